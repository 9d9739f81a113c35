"""Refinement of a finished file: its scales move to where the divergence from the original is smaller."""
