"""The tokenizer of a folder as the keys of a GGUF file."""
