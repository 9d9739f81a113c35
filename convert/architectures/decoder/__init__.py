"""Parts that ordinary decoders have in common: plain attention, norms, and dense blocks or experts.

    config    what config.json says of such a model
    rope      how it scales its rotation, and the order in which the file's architecture rotates
    metadata  the keys that all of them have, written and read back
    rules     the rules that most families share, and in which layers a rule applies
    family    all of them together; what llama.cpp computes otherwise

A family picks what it has and adds the rest.
"""
