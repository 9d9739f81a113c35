"""Small models that both we and transformers run, and the layers' loop without its files."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from imatrix.forward.open import ModelSource
from tests.imatrix.forward.observers import NaiveSums, Sums

N_TOKENS = 48
CHUNKS = np.random.RandomState(7).randint(0, 320, (3, N_TOKENS))
"""Token ids of three chunks, int64 (3, 48)."""

V2_GROUPED = {
    "q_lora_rank": None, "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2,
    "n_shared_experts": 2,
}  # fmt: skip
"""V2 with groups of experts, of which llama.cpp scores each by its two best, and without q_lora."""

V2_WITHOUT_Q_LORA = {"q_lora_rank": None, "n_shared_experts": 2}
YARN_WITH_MSCALE = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 40.0, "original_max_position_embeddings": 64,
    "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
}  # fmt: skip
OWN_MSCALE = YARN_WITH_MSCALE | {"mscale_all_dim": 0.707}
"""YaRN with two factors, of which a file has one."""


def run_all_layers(
    model: ModelSource, chunks: np.ndarray, **options: Any
) -> tuple[np.ndarray, dict[str, Sums]]:
    """Return the logits, (n_chunks, n_tokens, n_vocab), and the sums of squares of all layers."""
    import torch

    from imatrix.forward.hidden_states import MemoryStates
    from imatrix.forward.run import embed
    from imatrix.forward.sweep import Execution, LayerBuffers, Sweep, run_layer
    from imatrix.texts.tokens import Text

    torch.set_num_threads(1)  # the models are so small that threads mostly wait for each other
    network = model.network
    load = model.loader(torch.device("cpu"), options.pop("dtype", torch.float32))
    rounds = options.pop("rounds", False)
    load = replace(load, llama_rounding=rounds, half_cache=rounds)
    text = Text(chunks, chunks).chunks
    rotate = network.rope.rotation(text.longest, load.device)
    sweep = Sweep(
        build=lambda number: network.build(load, number, rotate),
        device=load.device,
        dtype=load.dtype,
        chunks=text,
        all_experts=options.pop("all_experts", False),
    )
    here, there = (MemoryStates(chunks.size, network.state_size) for _ in range(2))
    middle, latent = (MemoryStates(chunks.size, n) for n in (network.hidden_size, network.latent_cols))
    embed(load, text, here, network)
    sums: dict[str, Sums] = {}
    for layer in range(network.n_layers):
        observer = NaiveSums()
        run_layer(sweep, Execution(), layer, LayerBuffers(here, middle, there, latent), observer)
        sums |= observer.sums
        here, there = there, here
    norm = network.load_end(load)
    output = load.float32(network.output, network.vocab_size, network.hidden_size)
    bias, products = network.load_output_bias(load), norm(here.read(0, chunks.size)) @ output.T
    logits = network.logits(products if bias is None else products + bias)
    return logits.numpy().reshape(*chunks.shape, -1), sums
