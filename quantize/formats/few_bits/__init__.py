"""Q1_0, Q2_0, TQ1_0 and TQ2_0: for models trained in one or two bits."""
