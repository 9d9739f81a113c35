"""Families of encoders, which make vectors of texts, or rank texts."""
