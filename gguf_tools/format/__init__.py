"""The GGUF format: types, keys, headers, layouts, and readers of files and split sets."""
