"""Small files of feed-forward blocks with an inner size that no block of 256 divides."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from gguf_tools.files.partial_file import GGUFWriter
from gguf_tools.format.ggml_types import F32, GGMLType
from gguf_tools.format.shards import FileLayout
from gguf_tools.format.tensors import TensorInfo
from gguf_tools.format.values import Value
from quantize.formats import get_format

HIDDEN, DENSE, ROUTED, SHARED, N_EXPERTS = 256, 160, 96, 2, 3
"""Sizes of `deepseek2`: shared experts are SHARED times as large as a routed one."""

KEY = "deepseek2.expert_feed_forward_length"

METADATA: Mapping[str, Value] = {
    "general.architecture": Value.string("deepseek2"),
    "deepseek2.block_count": Value.u32(2),
    "deepseek2.feed_forward_length": Value.u32(DENSE),
    KEY: Value.u32(ROUTED),
    "deepseek2.expert_count": Value.u32(N_EXPERTS),
    "deepseek2.expert_shared_count": Value.u32(SHARED),
}

SHAPES: Mapping[str, tuple[int, ...]] = {
    "token_embd.weight": (40, HIDDEN),
    "output.weight": (40, HIDDEN),
    "blk.0.ffn_norm.weight": (HIDDEN,),
    "blk.0.ffn_gate.weight": (DENSE, HIDDEN),
    "blk.0.ffn_up.weight": (DENSE, HIDDEN),
    "blk.0.ffn_down.weight": (HIDDEN, DENSE),
    "blk.1.ffn_gate_inp.weight": (N_EXPERTS, HIDDEN),
    "blk.1.ffn_gate_exps.weight": (N_EXPERTS, ROUTED, HIDDEN),
    "blk.1.ffn_up_exps.weight": (N_EXPERTS, ROUTED, HIDDEN),
    "blk.1.ffn_down_exps.weight": (N_EXPERTS, HIDDEN, ROUTED),
    "blk.1.ffn_gate_shexp.weight": (SHARED * ROUTED, HIDDEN),
    "blk.1.ffn_up_shexp.weight": (SHARED * ROUTED, HIDDEN),
    "blk.1.ffn_down_shexp.weight": (HIDDEN, SHARED * ROUTED),
}


def values_of(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Return the weights of a tensor, the same each time."""
    seed = sum(name.encode())
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def infos(shapes: Mapping[str, tuple[int, ...]] = SHAPES, type_: GGMLType = F32) -> list[TensorInfo]:
    return [TensorInfo(name, shape, type_ if "ffn" in name and len(shape) > 1 else F32)
            for name, shape in shapes.items()]  # fmt: skip


def write_ffn_file(
    path: Path,
    shapes: Mapping[str, tuple[int, ...]] = SHAPES,
    metadata: Mapping[str, Value] = METADATA,
    type_: GGMLType = F32,
) -> Path:
    """Write a file whose feed-forward matrices have a type."""
    tensors = infos(shapes, type_)
    layout = FileLayout.of(metadata, tensors)
    with GGUFWriter(path, layout) as writer:
        for info in tensors:
            values = values_of(info.name, info.shape)
            if info.type != F32:
                values = get_format(info.type).encode(values.reshape(-1, info.n_cols), None)
            writer.write(layout.offset_of(info.name), values)
        writer.publish()
    return path
