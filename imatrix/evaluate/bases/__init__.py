"""Bases that files are compared with: a model, states kept of one, or a file of log probabilities."""
