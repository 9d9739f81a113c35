"""IQ1 to IQ4: weights as points of grids, or as levels that are closer together near zero."""
