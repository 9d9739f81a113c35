"""Attention: how tokens look at each other. One module for each kind."""
