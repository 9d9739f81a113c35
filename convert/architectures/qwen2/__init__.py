"""Qwen 2 and 2.5, and distills of that shape."""
