"""A Hugging Face folder: its files, opened as unread tensors and checked JSON."""
