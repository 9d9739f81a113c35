"""Chat templates: programs that a file brings along."""
