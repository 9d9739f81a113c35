"""Output tensors, which rules make of weights that are still unread.

Each class is one way to arrange rows. None holds data; all read what a row range needs and no more, from any
thread. They are the SourceTensors that the quantizer fills files from.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np

from convert.weights.base import Weight, rows_and_cols
from gguf_tools.format.ggml_types import F32, GGMLType
from quantize.fill import sources
from quantize.fill.sources import FLOAT_DTYPES, SourceTensor, joined, raw_rows, rows_dtype, split_rows


class OutputTensor(SourceTensor, Protocol):
    """One tensor of the file to come, by its name in that file.

    type       how raw_rows stores a row: F32, F16 or BF16, or the quantized type that the checkpoint's own
               codes can be had in
    stored_as  how the checkpoint holds the (first) weight that it is made of
    """

    @property
    def stored_as(self) -> str: ...


@dataclass(frozen=True)
class Renamed:
    """A weight as it is, under another name."""

    name: str
    shape: tuple[int, ...]
    type: GGMLType
    weight: Weight

    @property
    def stored_as(self) -> str:
        return self.weight.stored_as

    @property
    def by_rows(self) -> bool:
        return self.weight.by_rows

    def read_rows(self, start: int, stop: int) -> np.ndarray:
        rows = self.weight.read_rows(start, stop).astype(rows_dtype(self.type), copy=False)
        return np.ascontiguousarray(rows)

    def raw_rows(self, start: int, stop: int) -> np.ndarray:
        return raw_rows(self.weight, start, stop)


@dataclass(frozen=True)
class HeadRows(sources.HeadRows[Weight]):
    """A run of rows out of every head of a weight."""

    @property
    def stored_as(self) -> str:
        return self.tensor.stored_as


@dataclass(frozen=True)
class TransposedHeadRows(sources.TransposedHeads[Weight]):
    """A run of rows out of every head of a weight, transposed head by head."""

    @property
    def stored_as(self) -> str:
        return self.tensor.stored_as


@dataclass(frozen=True)
class Stacked:
    """Equal-sized weights one after the other, as a matrix each.

    Where they are stored in several types (some experts plain, others decoded), all are given as F32.
    """

    name: str
    shape: tuple[int, ...]
    type: GGMLType
    weights: tuple[Weight, ...]

    @property
    def stored_as(self) -> str:
        return self.weights[0].stored_as

    @property
    def by_rows(self) -> bool:
        return self.weights[0].by_rows

    def read_rows(self, start: int, stop: int) -> np.ndarray:
        dtype = rows_dtype(self.type)
        runs = [weight.read_rows(low, high) for weight, low, high in self._runs(start, stop)]
        return joined([rows.astype(dtype, copy=False) for rows in runs], (self.shape[-1],), dtype)

    def raw_rows(self, start: int, stop: int) -> np.ndarray:
        if self.type in FLOAT_DTYPES:
            return self.read_rows(start, stop).reshape(-1).view(np.uint8)
        blocks = [raw_rows(weight, low, high) for weight, low, high in self._runs(start, stop)]
        return joined(blocks, (), np.dtype(np.uint8))

    def _runs(self, start: int, stop: int) -> Iterator[tuple[Weight, int, int]]:
        """Yield the rows of weights that rows `start` to `stop`, counted over all matrices, are made of."""
        rows_per_weight, _ = rows_and_cols(self.weights[0].shape)
        for index, low, high in split_rows(start, stop, rows_per_weight):
            yield self.weights[index], low, high


@dataclass(frozen=True, eq=False)
class Computed:
    """A tensor that follows from the configuration: no weight of the checkpoint is in it.

    values  float32, in the tensor's shape
    """

    name: str
    values: np.ndarray

    stored_as: ClassVar[str] = "computed"
    by_rows: ClassVar[bool] = True

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    @property
    def type(self) -> GGMLType:
        return F32

    def read_rows(self, start: int, stop: int) -> np.ndarray:
        return self.values.reshape(-1, self.shape[-1])[start:stop]

    def raw_rows(self, start: int, stop: int) -> np.ndarray:
        return np.ascontiguousarray(self.read_rows(start, stop)).reshape(-1).view(np.uint8)


def common_type(weights: Sequence[Weight]) -> GGMLType:
    """Return the type that all `weights` have, F32 if there is none."""
    types = {weight.type for weight in weights}
    return types.pop() if len(types) == 1 else F32
