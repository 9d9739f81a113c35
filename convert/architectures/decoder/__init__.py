"""What ordinary decoders have in common: plain attention, norms, and dense blocks or experts.

    config        what config.json says of such a model
    rope          how it scales its rotation
    metadata      the keys that all of them have, written and read back
    layer_ranges  in which layers a rule applies
    rules         the rules that most families share
    family        all of them together; what llama.cpp computes otherwise
    rotated_rows  rows of queries and keys in the order that the file's architecture rotates

A family picks what it has and adds the rest.
"""
