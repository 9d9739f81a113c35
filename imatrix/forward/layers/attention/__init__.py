"""Attention: how tokens look at each other. One module for each kind."""

QUERY_BLOCK = 256
"""Number of queries in a block."""

SCORES_BYTES = 4 << 20
"""Size of a block's scores in float32. With 16 MB attention took twice as long: in every block, memory was
given back to the system and asked for again."""
