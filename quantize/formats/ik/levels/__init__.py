"""ik_llama.cpp's types that take the nearest of some levels: IQ*_K, IQ*_KS, IQ4_KSS and IQ2_KL."""
