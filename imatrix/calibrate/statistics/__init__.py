"""Second moments of what matrices multiply, and of the gradients at their outputs."""
