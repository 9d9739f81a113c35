"""How weights of delta nets are arranged: rows or columns that change places, and numbers that are mapped.

A checkpoint of Qwen 3.5 has the heads of values grouped: those that share a head of keys stand together. In
the file, they are tiled, as llama.cpp's products repeat the heads of keys as a whole:

    head j * n_key_heads + k of the file = head k * group + j of the checkpoint, 0 <= j < group

Qwen3-Next keeps them grouped. There, rows of queries, keys, values and gate stand together for each head of
keys, and become rows of all queries, all keys, all values, and of the gate, which is a tensor of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from convert.architectures.delta_net.config import DeltaNetConfig
from convert.architectures.rules import Arrange, Mapped, OutputTensor, Renamed
from convert.weights.base import Weight
from gguf_tools.format.ggml_types import F32
from quantize.fill.sources import consecutive_runs, float_type, joined, raw_rows, rows_dtype


@dataclass(frozen=True, eq=False)
class RowsMoved(Renamed):
    """A weight's rows in another order, or some of them: row i is row order[i] of the weight."""

    order: npt.NDArray[np.int64]

    def read_rows(self, start: int, stop: int) -> np.ndarray:
        dtype = rows_dtype(self.type)
        runs = [self.weight.read_rows(*run) for run in consecutive_runs(self.order[start:stop])]
        return joined([rows.astype(dtype, copy=False) for rows in runs], (self.shape[-1],), dtype)

    def raw_rows(self, start: int, stop: int) -> np.ndarray:
        runs = [raw_rows(self.weight, *run) for run in consecutive_runs(self.order[start:stop])]
        return joined(runs, (), np.dtype(np.uint8))


@dataclass(frozen=True, eq=False)
class ColumnsMoved(Renamed):
    """A weight's columns in another order, as floats: column i is column order[i] of the weight."""

    order: npt.NDArray[np.int64]

    def read_rows(self, start: int, stop: int) -> np.ndarray:
        return super().read_rows(start, stop)[:, self.order]


def decay(arrange: Arrange) -> Arrange:
    """Return a maker of the factors of a state's decay, -exp(A_log), whose heads `arrange` moves.

    They are rounded once: programs' own exponentials of float32 differ.
    """

    def negative_power(numbers: np.ndarray) -> np.ndarray:
        return -np.exp(numbers.astype(np.float64)).astype(np.float32)

    def made(name: str, weights: Sequence[Weight], config: Any) -> OutputTensor:
        moved = arrange(name, weights, config)
        return Mapped(name, moved.shape, F32, moved, negative_power)

    return made


def tiled_heads(config: DeltaNetConfig, n_rows: int) -> npt.NDArray[np.int64]:
    """Return for each row of the file, `n_rows` for a head of values, its number in the checkpoint."""
    heads = np.arange(config.linear_num_value_heads).reshape(config.linear_num_key_heads, -1).T.reshape(-1)
    return (heads[:, None] * n_rows + np.arange(n_rows)).reshape(-1)


def tiled_values(name: str, weights: Sequence[Weight], config: DeltaNetConfig) -> OutputTensor:
    """Return a matrix, or the numbers of a vector, with the heads of values tiled."""
    (weight,) = weights
    order = tiled_heads(config, weight.shape[0] // config.linear_num_value_heads)
    if len(weight.shape) == 1:
        return ColumnsMoved(name, weight.shape, float_type(weight), weight, order)
    return RowsMoved(name, weight.shape, weight.type, weight, order)


def tiled_columns(name: str, weights: Sequence[Weight], config: DeltaNetConfig) -> OutputTensor:
    """Return a matrix that multiplies values, with their heads tiled."""
    (weight,) = weights
    order = tiled_heads(config, config.linear_value_head_dim)
    return ColumnsMoved(name, weight.shape, float_type(weight), weight, order)


def tiled_behind_keys(name: str, weights: Sequence[Weight], config: DeltaNetConfig) -> OutputTensor:
    """Return a matrix of queries, keys and values, with the heads of the last tiled."""
    (weight,) = weights
    keys = 2 * config.key_rows
    order = np.concatenate((np.arange(keys), keys + tiled_heads(config, config.linear_value_head_dim)))
    return RowsMoved(name, (len(order), weight.shape[-1]), weight.type, weight, order)


def squeezed(name: str, weights: Sequence[Weight], config: DeltaNetConfig) -> OutputTensor:
    """Return the kernels of a convolution, (channels, 1, width), as a matrix."""
    (weight,) = weights
    return Renamed(name, (weight.shape[0], weight.shape[-1]), weight.type, weight)


def run_of_key_heads(first: bool) -> Arrange:
    """Return a picker of queries, keys and values (`first`), or the gate, of Qwen3-Next's in_proj_qkvz."""

    def picked(name: str, weights: Sequence[Weight], config: DeltaNetConfig) -> OutputTensor:
        (weight,) = weights
        n_heads, keys = config.linear_num_key_heads, config.linear_key_head_dim
        values = config.value_rows // n_heads
        rows = np.arange(config.all_rows).reshape(n_heads, -1)
        parts = np.split(rows, np.cumsum((keys, keys, values)), axis=1)
        order = np.concatenate([part.reshape(-1) for part in (parts[:3] if first else parts[3:])])
        return RowsMoved(name, (len(order), weight.shape[-1]), weight.type, weight, order)

    return picked
