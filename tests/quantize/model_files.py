"""Small model files with random weights and the tensors of a mixture of experts."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from gguf_tools.files.partial_file import GGUFWriter
from gguf_tools.format.ggml_types import F32
from gguf_tools.format.shards import FileLayout
from gguf_tools.format.tensors import TensorInfo
from gguf_tools.format.values import Value
from quantize.plan.sensitivities import Sensitivities, TensorSensitivity

N_EXPERTS, HIDDEN, WIDTH, N_LAYERS = 4, 256, 512, 3

BITS = {"IQ2_XS": 2.31, "Q2_K": 2.63, "Q3_K": 3.44, "IQ4_XS": 4.25, "Q4_K": 4.5, "Q6_K": 6.56, "Q8_0": 8.5}
"""Types that losses are made up for, with their bits per weight."""


def shapes() -> dict[str, tuple[int, ...]]:
    """Return the tensors' shapes by name, rows first."""
    tensors: dict[str, tuple[int, ...]] = {"token_embd.weight": (300, HIDDEN), "output.weight": (300, HIDDEN)}
    for layer in range(N_LAYERS):
        tensors[f"blk.{layer}.attn_norm.weight"] = (HIDDEN,)
        tensors[f"blk.{layer}.attn_output.weight"] = (HIDDEN, HIDDEN)
        for part in ("gate", "up"):
            tensors[f"blk.{layer}.ffn_{part}_exps.weight"] = (N_EXPERTS, WIDTH, HIDDEN)
        tensors[f"blk.{layer}.ffn_down_exps.weight"] = (N_EXPERTS, HIDDEN, WIDTH)
    return tensors


def write_mixture_model(path: Path) -> None:
    """Write an F32 file of a model whose layers are experts and one attention matrix."""
    infos = [TensorInfo(name, shape, F32) for name, shape in shapes().items()]
    metadata = {
        "general.architecture": Value.string("llama"),
        "llama.block_count": Value.u32(N_LAYERS),
        "llama.expert_count": Value.u32(N_EXPERTS),
    }
    layout = FileLayout.of(metadata, infos)
    random = np.random.default_rng(0)
    with GGUFWriter(path, layout) as writer:
        for info in infos:
            writer.write(layout.offset_of(info.name), random.standard_normal(info.shape, np.float32))
        writer.publish()


def made_up_losses() -> Sensitivities:
    """Return losses that fall fourfold with each bit, from a level of each tensor's own."""
    random = np.random.default_rng(1)
    tensors = {}
    for name, shape in shapes().items():
        if len(shape) == 1:
            continue
        level = float(random.lognormal(-2, 1))
        damage = {type_: level * 4.0**-bits for type_, bits in BITS.items()}
        tensors[name] = TensorSensitivity(shape, damage, ratio=float(random.uniform(0.2, 0.8)))
    return Sensitivities(tensors, {"name": "made up"}, {"name": "none"})
