"""Refinement of a finished file: scales and codes move to where it diverges less from the original."""
