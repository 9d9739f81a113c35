"""A text as tokens, and whether it is worth learning from."""
