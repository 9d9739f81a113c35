"""What each tensor of a model would cost at each type, told by one forward and one backward pass."""
