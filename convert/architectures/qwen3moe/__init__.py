"""Qwen 3 with routed experts."""
