"""Weights on the grids of formats that checkpoints are stored in: what they decode to, float32 matrices."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import ml_dtypes
import numpy as np

from convert.audit.expected import as_encoded
from gguf_tools.format.shards import open_gguf
from tests.support.packers import nf4
from tests.support.scaled_packers import fp8, mxfp4, nvfp4

Grid = Callable[[np.ndarray], np.ndarray]


def affine(bits: int, group: int, scale: type = np.float16, *, whole_zero: bool = True) -> Grid:
    """Return codes with a scale and a zero point for each group of a row; `whole_zero`: it is a code, too."""

    def put(weight: np.ndarray) -> np.ndarray:
        groups = weight.reshape(len(weight), -1, group)
        low, high = (end(groups, axis=2, keepdims=True) for end in (np.min, np.max))
        low, high = np.minimum(low, 0), np.maximum(high, 0)
        step = np.maximum((high - low) / (2**bits - 1), 1e-8).astype(scale).astype(np.float32)
        zero = np.round(-low / step) if whole_zero else (-low / step).astype(scale).astype(np.float32)
        codes = np.clip(np.round(groups / step + zero), 0, 2**bits - 1)
        return ((codes - zero) * step).reshape(weight.shape)

    return put


def symmetric(bits: int, group: int | None, scale: type = np.float16) -> Grid:
    """Return codes around 0 with a scale for each group of a row, or for each row."""

    def put(weight: np.ndarray) -> np.ndarray:
        groups = weight.reshape(len(weight), -1, group or weight.shape[1])
        most = 2 ** (bits - 1)
        largest = np.abs(groups).max(axis=2, keepdims=True)
        step = np.maximum(largest / (most - 1), 1e-8).astype(scale).astype(np.float32)
        return (np.clip(np.round(groups / step), -most, most - 1) * step).reshape(weight.shape)

    return put


def exl2(weight: np.ndarray) -> np.ndarray:
    """Half the columns have 4 bits and half 3; scales of groups are squares of 4-bit numbers."""
    groups = weight.reshape(len(weight), -1, 32)
    most = np.where(np.arange(groups.shape[1]) % 2, 8, 4)[None, :, None]
    wanted = np.abs(groups).max(axis=2, keepdims=True) / (most - 1)
    largest = wanted.max(axis=1, keepdims=True)
    step = (np.ceil(np.sqrt(wanted / largest) * 16) / 16) ** 2 * largest.astype(np.float16).astype(np.float32)
    return (np.clip(np.round(groups / step), -most, most - 1) * step).reshape(weight.shape)


GRIDS: Mapping[str, Grid] = {
    "fp8": lambda weight: fp8(weight, (128, 128), ".s")[1],
    "mxfp4": lambda weight: mxfp4(weight)[1],
    "nvfp4": lambda weight: nvfp4(weight)[1],
    "gptq": affine(4, 128),
    "marlin": symmetric(4, 128),
    "awq": affine(4, 64),
    "auto-round": affine(2, 32),
    "exl2": exl2,
    "eetq": symmetric(8, None),
    "bitsandbytes": lambda weight: nf4(weight, 64)[1],
    "hqq": affine(3, 64, whole_zero=False),
    "mlx": affine(4, 32, ml_dtypes.bfloat16, whole_zero=False),
    "compressed-tensors": symmetric(8, None, np.float32),
    "torchao": affine(4, 256, ml_dtypes.bfloat16, whole_zero=False),
}
"""Format -> what weights it keeps: the packed formats of `convert/weights/schemes`."""


def encoded_as(type_name: str) -> Grid:
    """Return what a GGUF type makes of weights: those of a base that was encoded before."""
    from gguf_tools.format.ggml_types import by_name

    def put(weight: np.ndarray) -> np.ndarray:
        encoded = as_encoded(by_name(type_name), weight)
        assert encoded is not None
        return encoded[1]

    return put


def on_grid(path: Path, output: Path, grid: Grid) -> Path:
    """Copy an F32 file with the matrices of its layers on a grid."""
    shutil.copy(path, output)
    with open_gguf(path) as file, open(output, "r+b") as out:
        for name, info in file.tensors.items():
            if name.startswith("blk.") and len(info.shape) == 2:
                rows = file.read_rows(name, 0, info.n_rows).view(np.float32).reshape(info.shape)
                out.seek(file.data_offset(name))
                out.write(np.ascontiguousarray(grid(rows), np.float32).tobytes())
    return output
