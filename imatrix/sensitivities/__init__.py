"""Sensitivity of a model to the type of each tensor, from one forward and one backward pass."""
