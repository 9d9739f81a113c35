"""The GLM-5 family as llama.cpp's `glm-dsa`: DeepSeek V3.2's tensors and keys with GLM's tokenizer.

Its layers may share an indexer's choice (`indexer_types`).
"""
