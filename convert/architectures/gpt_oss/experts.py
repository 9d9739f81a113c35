"""The experts of gpt-oss, which a checkpoint stores as stacks with gate and up interleaved.

    gate_up_proj       packed (experts, 2 width, hidden_size): rows of gate and up by turns
                       plain  (experts, hidden_size, 2 width): the same transposed
    down_proj          packed (experts, hidden_size, width), plain (experts, width, hidden_size)
    gate_up_proj_bias  (experts, 2 width), gate and up by turns

Published checkpoints are packed (MXFP4), and their codes are kept. Finetunes may be plain.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from convert.architectures.arrange import OutputTensor, Renamed, TransposedHeadRows
from convert.architectures.decoder.config import DecoderConfig
from convert.architectures.rules import Arrange
from convert.weights.base import Weight
from convert.weights.plain import TYPES
from gguf_tools.format.ggml_types import GGMLType
from quantize.fill.heads import raw_rows
from quantize.fill.sources import rows_dtype

GATE, UP = 0, 1
"""Which of two rows, or columns, is the gate's and which is up's."""


def is_packed(weight: Weight) -> bool:
    """Return whether a stack of experts is stored as codes, with its rows as everywhere else."""
    return weight.stored_as not in TYPES


@dataclass(frozen=True)
class AlternateRows:
    """Every second row of a tensor, from `first` on."""

    name: str
    shape: tuple[int, ...]
    tensor: Weight | TransposedHeadRows
    first: int

    @property
    def type(self) -> GGMLType:
        return self.tensor.type

    @property
    def stored_as(self) -> str:
        return self.tensor.stored_as

    @property
    def by_rows(self) -> bool:
        return self.tensor.by_rows

    def read_rows(self, start: int, stop: int) -> np.ndarray:
        rows = self.tensor.read_rows(2 * start, 2 * stop)[self.first :: 2]
        return np.ascontiguousarray(rows.astype(rows_dtype(self.type), copy=False))

    def raw_rows(self, start: int, stop: int) -> np.ndarray:
        rows = raw_rows(self.tensor, 2 * start, 2 * stop).reshape(2 * (stop - start), -1)
        return np.ascontiguousarray(rows[self.first :: 2]).reshape(-1)


@dataclass(frozen=True)
class AlternateCols(Renamed):
    """Every second column of a matrix, from `first` on."""

    first: int

    def read_rows(self, start: int, stop: int) -> np.ndarray:
        rows = super().read_rows(start, stop)
        return np.ascontiguousarray(rows[:, self.first :: 2])

    def raw_rows(self, start: int, stop: int) -> np.ndarray:
        return self.read_rows(start, stop).reshape(-1).view(np.uint8)


def half_of_gate_up(first: int) -> Arrange:
    """Return what makes gate or up of gate_up_proj, (experts, width, hidden_size)."""

    def arrange(name: str, weights: Sequence[Weight], config: DecoderConfig) -> OutputTensor:
        (weight,) = weights
        shape = (config.num_experts, config.moe_intermediate_size, config.hidden_size)
        return AlternateRows(name, shape, weight if is_packed(weight) else _transposed(name, weight), first)

    return arrange


def half_of_bias(first: int) -> Arrange:
    """Return what makes the bias of gate or of up, (experts, width)."""

    def arrange(name: str, weights: Sequence[Weight], config: DecoderConfig) -> OutputTensor:
        (weight,) = weights
        shape = (config.num_experts, config.moe_intermediate_size)
        return AlternateCols(name, shape, weight.type, weight, first)

    return arrange


def down(name: str, weights: Sequence[Weight], config: DecoderConfig) -> OutputTensor:
    """Return down, (experts, hidden_size, width)."""
    (weight,) = weights
    if is_packed(weight):
        return Renamed(name, weight.shape, weight.type, weight)
    return _transposed(name, weight)


def _transposed(name: str, weight: Weight) -> TransposedHeadRows:
    n_mats, n_rows, n_cols = weight.shape
    return TransposedHeadRows(name, (n_mats, n_cols, n_rows), weight, n_rows, 0, n_rows)
