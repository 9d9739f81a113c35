"""ik_llama.cpp's trellis types, IQ*_KT."""
