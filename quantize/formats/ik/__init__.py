"""ik_llama.cpp's own types, which can be decoded and not encoded yet."""
