"""Deciding which tensor gets which type, and why: pure data, no weight is read."""
