"""Types chosen for a size: the least divergence that fits into so many bytes."""
