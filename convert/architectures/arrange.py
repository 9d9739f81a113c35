"""Output tensors: what rules make of weights, still unread.

Each class is one way to arrange rows; none holds data, all read what a row range needs and no more, from any
thread. They are the SourceTensors that the quantizer fills files from.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from convert.weights.base import BlockWeight, Weight, rows_and_cols
from gguf_tools.ggml_types import F32, GGMLType
from quantize.fill.sources import FLOAT_DTYPES, rows_dtype


@dataclass(frozen=True, slots=True)
class Run:
    """Rows `first` to `last` of a weight."""

    weight: Weight
    first: int
    last: int


@dataclass(frozen=True)
class OutputTensor:
    """One tensor of the file to come.

    name    its name in the GGUF file
    shape   rows first: (n_mats, n_rows, n_cols), (n_rows, n_cols) or (n_cols,)
    type    how raw_rows stores a row: F32, F16 or BF16, or the quantized type that the checkpoint's own codes
            can be had in
    """

    name: str
    shape: tuple[int, ...]
    type: GGMLType

    def runs(self, start: int, stop: int) -> Iterator[Run]:
        """Yield the rows of weights that rows `start` to `stop`, counted over all matrices, are made of."""
        raise NotImplementedError

    def read_rows(self, start: int, stop: int) -> np.ndarray:
        """Return rows `start` to `stop`, (stop - start, n_cols), C-contiguous, decoded where quantized."""
        dtype = rows_dtype(self.type)
        return _joined(
            [
                run.weight.read_rows(run.first, run.last).astype(dtype, copy=False)
                for run in self.runs(start, stop)
            ],
            (self.shape[-1],),
            dtype,
        )

    def raw_rows(self, start: int, stop: int) -> np.ndarray:
        """Return the same rows as the bytes of `type`, uint8."""
        if self.type in FLOAT_DTYPES:
            return self.read_rows(start, stop).reshape(-1).view(np.uint8)
        return _joined([_blocks(run) for run in self.runs(start, stop)], (), np.dtype(np.uint8))

    @property
    def stored_as(self) -> str:
        """How the checkpoint holds the (first) weight that this is made of."""
        return next(self.runs(0, 1)).weight.stored_as

    @property
    def by_rows(self) -> bool:
        """Whether few rows at a time are read as fast as many: as the (first) weight is."""
        return next(self.runs(0, 1)).weight.by_rows


@dataclass(frozen=True)
class Renamed(OutputTensor):
    """A weight as it is, under another name."""

    weight: Weight

    def runs(self, start: int, stop: int) -> Iterator[Run]:
        yield Run(self.weight, start, stop)


@dataclass(frozen=True)
class HeadRows(OutputTensor):
    """A run of rows out of every head of a weight.

    weight     (n_heads * head_rows, n_cols)
    head_rows  rows of one head in `weight`
    first      where in a head the run begins
    count      how many rows it has; the result has n_heads * count rows of n_cols
    """

    weight: Weight
    head_rows: int
    first: int
    count: int

    def runs(self, start: int, stop: int) -> Iterator[Run]:
        for head, low, high in _split_rows(start, stop, self.count):
            base = head * self.head_rows + self.first
            yield Run(self.weight, base + low, base + high)


@dataclass(frozen=True)
class TransposedHeadRows(OutputTensor):
    """A run of rows out of every head of a weight, transposed head by head.

    weight, head_rows, first, count  as in HeadRows; the result has n_heads * n_cols rows of `count`

    A row of the result is a column of the weight: for any row, its whole head (count x n_cols) is read. Its
    type is a float type, see `row_type`.
    """

    weight: Weight
    head_rows: int
    first: int
    count: int

    def read_rows(self, start: int, stop: int) -> np.ndarray:
        _, rows_per_head = rows_and_cols(self.weight.shape)
        parts = []
        for head, low, high in _split_rows(start, stop, rows_per_head):
            base = head * self.head_rows + self.first
            parts.append(self.weight.read_rows(base, base + self.count).T[low:high])
        return _joined(parts, (self.shape[-1],), FLOAT_DTYPES[self.type])

    @property
    def stored_as(self) -> str:
        return self.weight.stored_as

    @property
    def by_rows(self) -> bool:
        return False


@dataclass(frozen=True)
class Stacked(OutputTensor):
    """Equal-sized weights one after the other, as a matrix each.

    Where they are stored in several types (some experts plain, others decoded), all are given as F32.
    """

    weights: tuple[Weight, ...]

    def runs(self, start: int, stop: int) -> Iterator[Run]:
        rows_per_weight, _ = rows_and_cols(self.weights[0].shape)
        for index, low, high in _split_rows(start, stop, rows_per_weight):
            yield Run(self.weights[index], low, high)


def row_type(weight: Weight) -> GGMLType:
    """Return the float type of a weight's rows as they are read: its type, or F32 for a quantized one."""
    return weight.type if weight.type in FLOAT_DTYPES else F32


def common_type(weights: Sequence[Weight]) -> GGMLType:
    """Return the type that all `weights` have, F32 if there is none."""
    types = {weight.type for weight in weights}
    return types.pop() if len(types) == 1 else F32


def _split_rows(start: int, stop: int, size: int) -> Iterator[tuple[int, int, int]]:
    """Yield (index, low, high) for every matrix of `size` rows that rows `start` to `stop` touch.

    >>> list(_split_rows(3, 9, 4))
    [(0, 3, 4), (1, 0, 4), (2, 0, 1)]
    """
    while start < stop:
        index, low = divmod(start, size)
        high = min(size, low + stop - start)
        yield index, low, high
        start += high - low


def _blocks(run: Run) -> np.ndarray:
    """Return the rows of a run as blocks of their weight's type."""
    assert isinstance(run.weight, BlockWeight), f"{run.weight.name}: {run.weight.type.name}, but no blocks"
    return run.weight.raw_rows(run.first, run.last)


def _joined(parts: list[np.ndarray], row: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Return `parts`, of rows of the shape `row`, below each other; a single one as it is if C-contiguous."""
    if len(parts) == 1:
        return np.ascontiguousarray(parts[0])
    out = np.empty((sum(map(len, parts)), *row), dtype)
    return np.concatenate(parts, out=out) if parts else out
