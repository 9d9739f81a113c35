"""Packers of quantized checkpoint formats, written from the layouts alone: slow, obvious, for small matrices.

Each takes a float32 matrix and returns the tensors that the format stores for it (suffix -> array), and the
float32 matrix that these decode to. `pack_projections` packs a whole folder.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.checkpoints import (
    Tensors,
    edit_config,
    edit_tensors,
    read_config,
    read_tensors,
    write_checkpoint,
)

Packed = tuple[Tensors, np.ndarray]


def pack_projections(
    folder: Path,
    decoded: Path,
    pack: Callable[[str, np.ndarray], Packed | None],
    quantization: dict[str, Any],
) -> Path:
    """Store the projections in `folder` as `pack` packs them, and the weights that they mean in `decoded`.

    pack  (module, matrix) -> tensors to store under module + suffix, and their meaning; None leaves it plain
    """
    plain = {name: tensor.astype(np.float32) for name, tensor in read_tensors(folder).items()}

    def edit(tensors: Tensors) -> None:
        for name in [n for n in tensors if n.endswith(("_proj.weight", "_proj_with_mqa.weight"))]:
            module = name.removesuffix(".weight")
            packed = pack(module, tensors[name].astype(np.float32))
            if packed is not None:
                stored, meaning = packed
                del tensors[name]
                tensors.update({module + suffix: array for suffix, array in stored.items()})
                plain[name] = meaning

    config = read_config(folder)
    edit_tensors(folder, edit)
    write_checkpoint(decoded, config, plain)
    return edit_config(folder, quantization_config=quantization)


def pack_low_first(codes: np.ndarray, bits: int) -> np.ndarray:
    """Return every row of `codes` as a stream of bits, lowest bits first: uint32 (n_rows, n_words)."""
    n_words = -(-codes.shape[1] * bits // 32)
    rows = []
    for row in codes:
        stream = sum(int(code) << (bits * k) for k, code in enumerate(row))
        rows.append(np.frombuffer(stream.to_bytes(4 * n_words, "little"), "<u4"))
    return np.array(rows, np.uint32).reshape(len(codes), n_words)


def pack_planes(codes: np.ndarray, bits: int) -> np.ndarray:
    """Return rows of codes as planes: for every 32 codes, their low bits first, then the higher bits."""
    parts = []
    for first in range(0, codes.shape[1], 32):
        shift = 0
        for width in [width for width in (4, 2, 1) if bits & width]:
            parts.append(pack_low_first(codes[:, first : first + 32] >> shift & (1 << width) - 1, width))
            shift += width
    return np.concatenate(parts, axis=1)


def quantize_groups(
    weight: np.ndarray, bits: int, groups: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return codes (n_rows, n_cols), zeros and scales (n_rows, n_groups), and the matrix that they mean.

    groups  the group of every column
    """
    n_groups, top = int(groups.max()) + 1, (1 << bits) - 1
    low = np.stack([weight[:, groups == g].min(axis=1) for g in range(n_groups)], axis=1)
    high = np.stack([weight[:, groups == g].max(axis=1) for g in range(n_groups)], axis=1)
    scales = ((high - low) / top).astype(np.float16)
    zeros = np.clip(np.rint(-low / scales.astype(np.float32)), 0, top).astype(np.int64)
    wide = scales.astype(np.float32)[:, groups]
    codes = np.clip(np.rint(weight / wide) + zeros[:, groups], 0, top).astype(np.int64)
    return codes, zeros, scales, (codes - zeros[:, groups]).astype(np.float32) * wide


def gptq(
    weight: np.ndarray, bits: int, groups: np.ndarray, *, version: int = 1, with_groups: bool = True
) -> Packed:
    """Pack as GPTQ does.

    groups   the group of every column
    version  1 stores zero points minus 1
    """
    codes, zeros, scales, meaning = quantize_groups(weight, bits, groups)
    pack = pack_planes if bits in (5, 6, 7) else pack_low_first
    packed_zeros = pack(zeros.T, bits)
    if version == 1 and bits == 3:
        packed_zeros = pack((zeros.T - 1) % 8, bits)
    elif version == 1:
        # On whole words: a zero of 0 borrows from the field above.
        packed_zeros = packed_zeros - np.uint32(sum(1 << shift for shift in range(0, 32, bits)))
    tensors = {
        ".qweight": np.ascontiguousarray(pack(codes, bits).T).view(np.int32),
        ".qzeros": packed_zeros.view(np.int32),
        ".scales": np.ascontiguousarray(scales.T),
    }
    if with_groups:
        tensors[".g_idx"] = groups.astype(np.int32)
    return tensors, meaning


def awq_gemm(weight: np.ndarray, group_size: int) -> Packed:
    """Pack as AutoAWQ's GEMM does: eight outputs in a word, those with even numbers first."""
    groups = np.arange(weight.shape[1]) // group_size
    codes, zeros, scales, meaning = quantize_groups(weight, 4, groups)

    def pack(values: np.ndarray) -> np.ndarray:
        eights = values.T.reshape(values.shape[1], -1, 8)[:, :, [0, 2, 4, 6, 1, 3, 5, 7]]
        return pack_low_first(eights.reshape(values.shape[1], -1), 4).view(np.int32)

    tensors = {".qweight": pack(codes), ".qzeros": pack(zeros), ".scales": np.ascontiguousarray(scales.T)}
    return tensors, meaning


NF4 = np.array(
    [-1, -0.6961928, -0.52507305, -0.39491749, -0.28444138, -0.18477343, -0.09105004, 0, 0.0795803, 0.1609302,
     0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1], np.float32,
)  # fmt: skip


def nf4(weight: np.ndarray, block: int, *, nested: bool = False) -> Packed:
    """Pack as bitsandbytes does: blocks of the flat matrix, the first code of a byte in its high half."""
    flat = weight.reshape(-1)
    n_blocks = -(-flat.size // block)
    padded = np.pad(flat, (0, n_blocks * block - flat.size)).reshape(n_blocks, block)
    scales = np.abs(padded).max(axis=1)
    state: dict[str, Any] = {
        "quant_type": "nf4", "blocksize": block, "dtype": "bfloat16", "shape": list(weight.shape)
    }  # fmt: skip
    tensors: Tensors = {".weight.absmax": scales, ".weight.quant_map": NF4}
    if nested:
        offset = float(np.float32(scales.mean()))
        values = np.linspace(-1, 1, 256, dtype=np.float32)
        apart = scales - np.float32(offset)
        blocks = np.arange(n_blocks) // 256
        outer = np.array([np.abs(apart[blocks == b]).max() for b in range(blocks[-1] + 1)])
        ratio = apart / np.maximum(outer, np.float32(1e-9))[blocks]
        stored = np.abs(ratio[:, None] - values).argmin(axis=1).astype(np.uint8)
        scales = values[stored] * outer[blocks] + np.float32(offset)
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
        tensors |= {
            ".weight.absmax": stored,
            ".weight.nested_absmax": outer.astype(np.float32),
            ".weight.nested_quant_map": values,
        }
    codes = np.abs((padded / scales[:, None])[:, :, None] - NF4).argmin(axis=2)
    meaning = (NF4[codes] * scales[:, None]).reshape(-1)[: flat.size].reshape(weight.shape)
    pairs = codes.reshape(-1)[: flat.size + flat.size % 2].reshape(-1, 2)
    tensors[".weight"] = (pairs[:, 0] << 4 | pairs[:, 1]).astype(np.uint8)[:, None]
    state_name = ".weight.quant_state.bitsandbytes__nf4"
    tensors[state_name] = np.frombuffer(json.dumps(state).encode(), np.uint8)
    return tensors, meaning
