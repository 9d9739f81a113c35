"""DeepSeek V3.2 as llama.cpp's `deepseek32`: V3 whose layers attend only what an indexer chooses.

    config    V3's configuration and the indexer's sizes
    rules     V3's tensors and the indexer's
    metadata  V3's keys and the indexer's, written and read back
    family    all of them together
"""
