"""Changing files without touching weights: headers, names, how tensors are dealt to files."""
