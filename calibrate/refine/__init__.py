"""Refinement of a finished file: scales and codes move to where its divergence from the original is smaller."""
