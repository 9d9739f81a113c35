"""ik_llama.cpp's types whose rows are interleaved, *_R4 and *_R8."""
