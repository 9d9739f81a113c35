"""SIMD vectors as numba types, and what kernels are made of: no ggml type is known here."""
