"""Kimi-VL and Kimi K2.5: their text part is a DeepSeek V3, as `deepseek2`; vision tensors are left out."""
