"""What a folder says about its model: general keys, model cards, names."""
