"""Qwen 3, and distills of that shape."""
