"""The card of quantized files: a README.md with the front matter that the Hub expects."""
