"""Filling the byte ranges of an output, and publishing it when it is whole."""
