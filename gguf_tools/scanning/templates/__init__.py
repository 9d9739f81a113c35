"""Chat templates: programs inside a file."""
