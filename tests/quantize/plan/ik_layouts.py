"""Models for which ik_llama.cpp's plans are recorded, with small shapes that give the same plans.

A plan depends on names, on the metadata, and on whether rows are whole blocks and matrices whole groups of
rows. Sizes beyond that make no difference, and files of headers stay small. One head of keys and values
(attention.head_count_kv) is refused by ik_llama.cpp unless all other sizes are DeepSeek-V3's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from gguf_tools.format.shards import FileLayout
from gguf_tools.format.tensors import TensorInfo
from gguf_tools.format.values import Metadata
from tests.quantize.plan.any_architecture import metadata_of, tensors_of
from tests.quantize.plan.layouts import HIDDEN, LAYOUTS, LORA, Layout

_LATENT = {
    "attn_q_a.weight": (1536, HIDDEN),
    "attn_q_b.weight": (3072, 1536),
    "attn_kv_a_mqa.weight": (576, HIDDEN),
    "attn_kv_b.weight": (4096, LORA),
    "attn_k_b.weight": (8192, 128),
    "attn_v_b.weight": (2048, LORA),
    "attn_output.weight": (HIDDEN, 2048),
}
_EXPERTS = {
    f"ffn_{part}_{kind}.weight": (*mats, HIDDEN, 1536)
    for part in ("down", "gate", "up")
    for kind, mats in (("exps", (64,)), ("shexp", ()))
}
_ODD = {"attn_v.weight": (512, 2176), "ffn_down.weight": (2050, 4096), "ffn_up.weight": (4100, HIDDEN)}

_LAYOUTS: Mapping[str, Layout] = {
    **{name: replace(layout, n_kv_heads=max(4, layout.n_kv_heads)) for name, layout in LAYOUTS.items()},
    "latent attention": Layout(_LATENT | _EXPERTS, n_kv_heads=16),
    "eight experts, latent attention": Layout(_LATENT | _EXPERTS, n_kv_heads=16, n_experts=8),
    "rows that fill no group": Layout(_LATENT | _ODD, n_kv_heads=16, n_experts=0),
}
_ANY = ("llama-3.1-8b", "llama-3.3-70b", "qwen3-8b", "phi-3-mini")


@dataclass(frozen=True)
class Model:
    """A model as a header: tensors in file order, and the metadata."""

    tensors: tuple[TensorInfo, ...]
    metadata: Metadata


def _small(info: TensorInfo) -> TensorInfo:
    """Return a tensor with fewer matrices, rows and columns, for which the same is decided."""
    if len(info.shape) < 2:
        return info
    n_cols = info.n_cols % 256 or 256
    n_rows = next((16 // part for part in (1, 2, 4) if info.shape[-2] % (16 // part) == 0), 2)
    mats = tuple(min(length, 2) for length in info.shape[:-2])
    return TensorInfo(info.name, (*mats, n_rows, n_cols), info.type)


def model(name: str) -> Model:
    """Return one of MODELS."""
    if name in _LAYOUTS:
        layout = _LAYOUTS[name]
        return Model(tuple(map(_small, layout.tensors)), layout.metadata)
    return Model(tuple(map(_small, tensors_of(name))), metadata_of(name))


def write_header(model_: Model, path: Path) -> Path:
    """Write the model with a hole where the data would be."""
    laid_out = FileLayout.of(model_.metadata, model_.tensors)
    with open(path, "wb") as file:
        file.write(laid_out.header)
        file.truncate(laid_out.total_bytes)
    return path


MODELS = (*_LAYOUTS, *_ANY)
