"""What each tensor of a model costs at each type, from one forward and one backward pass."""
