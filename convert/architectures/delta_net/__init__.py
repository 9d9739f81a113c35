"""Qwen3-Next and Qwen 3.5: three layers of gated delta nets to one of attention, and what they share."""
