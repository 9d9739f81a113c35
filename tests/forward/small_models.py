"""Small models that both we and transformers run, and the layers' loop without its files."""

from __future__ import annotations

from typing import Any

import numpy as np

from imatrix.accumulate import Accumulator
from forward.open import ModelSource

N_TOKENS = 48
CHUNKS = np.random.RandomState(7).randint(0, 320, (3, N_TOKENS))
"""Token ids of three chunks, int64 (3, 48)."""

# V2 with groups of experts and without q_lora: llama.cpp cannot run it, so support.checkpoints lacks it.
V2_GROUPED = {
    "q_lora_rank": None, "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2,
    "n_shared_experts": 2,
}  # fmt: skip
YARN_WITH_MSCALE = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 40.0, "original_max_position_embeddings": 64,
    "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 0.707,
}  # fmt: skip


def run_all_layers(model: ModelSource, chunks: np.ndarray, **options: Any) -> tuple[np.ndarray, Accumulator]:
    """Return the logits, (n_chunks, n_tokens, n_vocab), and what all layers have seen."""
    import torch

    from forward.layer import Sweep, run_layer
    from forward.load import Loader
    from forward.norm import rms_norm
    from forward.rope import rotation
    from imatrix.run import embed
    from forward.hidden_states import MemoryStates
    from forward.text import Text

    torch.set_num_threads(1)  # the models are so small that threads mostly wait for each other
    config = model.config
    load = Loader(model, torch.device("cpu"), options.pop("dtype", torch.float32))
    sweep = Sweep(
        load=load,
        chunk_size=chunks.shape[1],
        rotate=rotation(config, chunks.shape[1], load.device),
        all_experts=options.pop("all_experts", False),
        advance=lambda share: None,
    )
    here, there = (MemoryStates(chunks.size, config.hidden_size) for _ in range(2))
    embed(load, Text(chunks, chunks), here)
    seen = Accumulator()
    for layer in range(config.num_hidden_layers):
        found = run_layer(sweep, layer, here, here, there)
        seen.sums |= found.sums
        seen.counts |= found.counts
        here, there = there, here
    norm = load.float32("output_norm.weight", config.hidden_size)
    name = "token_embd.weight" if config.tie_word_embeddings else "output.weight"
    output = load.float32(name, config.vocab_size, config.hidden_size)
    logits = rms_norm(here.read(0, chunks.size), norm, config.rms_norm_eps) @ output.T
    return logits.numpy().reshape(*chunks.shape, -1), seen
