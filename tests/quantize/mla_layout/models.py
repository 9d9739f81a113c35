"""Small files of latent attention, in any layout and of any types."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from gguf_tools import open_gguf
from gguf_tools.files.partial_file import GGUFWriter
from gguf_tools.format.ggml_types import F32, GGMLType
from gguf_tools.format.shards import FileLayout
from gguf_tools.format.tensors import TensorInfo
from gguf_tools.format.values import Value
from quantize.mla_layout.layouts import HeadSizes, roles_in, tensor_name
from quantize.roles import MLALayout, Role

KV, K, V = Role.ATTN_KV_B, Role.ATTN_K_B, Role.ATTN_V_B
SIZES = HeadSizes(n_heads=3, nope=32, rope=16, value=16, kv_lora=256)


def keys_of(layout: MLALayout, sizes: HeadSizes = SIZES, **changes: Value | None) -> dict[str, Value]:
    """The metadata of a model in a layout, written out; a change to None leaves a key out."""
    split = layout == "split"
    numbers = {
        "block_count": 2,
        "attention.head_count": sizes.n_heads,
        "attention.head_count_kv": 1 if split else sizes.n_heads,
        "attention.key_length": (sizes.kv_lora if split else sizes.nope) + sizes.rope,
        "attention.value_length": sizes.kv_lora if split else sizes.value,
        "attention.kv_lora_rank": sizes.kv_lora,
        **({"attention.key_length_mla": sizes.nope + sizes.rope} if split else {}),
        **({"attention.value_length_mla": sizes.value} if split else {}),
        "rope.dimension_count": sizes.rope,
    }
    metadata = {f"deepseek2.{key}": Value.u32(number) for key, number in numbers.items()}
    if layout == "both":
        metadata["deepseek2.expert_weights_norm"] = Value.bool_(False)
    metadata = {"general.architecture": Value.string("deepseek2")} | metadata
    for key, value in changes.items():
        metadata.pop(name := f"deepseek2.{key.replace('__', '.')}", None)
        if value is not None:
            metadata[name] = value
    return metadata


def infos_of(
    layout: MLALayout, type_: GGMLType | Mapping[Role, GGMLType] = F32, n_layers: int = 2
) -> list[TensorInfo]:
    chosen = type_ if isinstance(type_, Mapping) else dict.fromkeys((KV, K, V), type_)
    return [
        TensorInfo(tensor_name(layer, role), SIZES.shape(role, layout), chosen[role])
        for layer in range(n_layers)
        for role in roles_in(layout)
    ]


def write(path: Path, metadata: Mapping[str, Value], tensors: Mapping[TensorInfo, bytes]) -> Path:
    layout = FileLayout.of(metadata, tensors)
    with GGUFWriter(path, layout) as writer:
        for info, data in tensors.items():
            writer.write(layout.offset_of(info.name), data)
        writer.publish()
    return path


def any_bytes(info: TensorInfo) -> bytes:
    """Bytes in which no 2 or 4 are a NaN or an infinity."""
    rng = np.random.default_rng([*info.name.encode()])
    return rng.integers(0, 0x70, info.n_bytes, np.uint8).tobytes()


def model(path: Path, layout: MLALayout, type_: GGMLType | Mapping[Role, GGMLType], **keys: Any) -> Path:
    """Write a model of two layers of arbitrary bytes."""
    infos = [TensorInfo("token_embd.weight", (4, 32), F32), *infos_of(layout, type_)]
    return write(path, keys_of(layout, **keys), {info: any_bytes(info) for info in infos})


def raw(path: Path, layer: int, role: Role) -> bytes:
    with open_gguf(path) as file:
        return bytes(file.raw(tensor_name(layer, role)))
