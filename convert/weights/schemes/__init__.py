"""Quantization schemes of Hugging Face checkpoints, a module each."""
