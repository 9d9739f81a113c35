"""DeepSeek V2, V2.5, V3, V3.1, R1 and their derivatives as llama.cpp's `deepseek2`, and their relatives.

config    what config.json says, checked and complete
rules     which weights become which tensors, and which are left out
metadata  the keys deepseek2.*, written and read back
family    all of them together, and `relative`, which says what another family has otherwise

relatives has a block for each relative; deepseek32 is the indexer of V3.2 and GLM-5, and mistral_large3 reads
Mistral's own format.
"""
