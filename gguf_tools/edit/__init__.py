"""Changing files without touching weights: their headers, names, and how tensors are split over files."""
