"""Q4_0, Q4_1, Q5_0, Q5_1 and Q8_0: 32 weights and one scale a block."""
