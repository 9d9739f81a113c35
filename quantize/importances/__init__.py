"""Importances: entries per tensor, the files they come in, and how they weigh errors."""
