"""Q2_K to Q6_K and Q8_K: 256 weights in sub-blocks with scales of their own."""
