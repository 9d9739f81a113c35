"""DeepSeek V2, V2.5, V3, V3.1, R1 and their derivatives as llama.cpp's `deepseek2`, and their relatives.

config    what config.json says, checked and complete
rules     which weights become which tensors, and which are left out
metadata  the keys deepseek2.*, written and read back
family    all of them together, and `relative`, which says what another family has otherwise

Each relative is a module: youtu, kimi, glm4_moe_lite (GLM-4.7-Flash), mistral_large3; deepseek32, whose
attention has an indexer, and glm_moe_dsa (GLM-5), its relative.
"""
