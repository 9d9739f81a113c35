"""Families with layers that carry a state along a text: Mamba 2 and short convolutions."""
