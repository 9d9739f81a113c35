"""Rows of matrices whose heads lie one below the other: picked or transposed, head by head and unread.

What is arranged may be a tensor of a GGUF file or a weight of a checkpoint: anything whose rows can be read.
A read takes what its rows need and no more; of a transposed matrix that is whole heads, one at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from gguf_tools.format.ggml_types import F32, GGMLType
from quantize.fill.sources import FLOAT_DTYPES, RowSource, SourceTensor, rows_dtype

Source = TypeVar("Source", bound=RowSource)


@dataclass(frozen=True)
class HeadRows(Generic[Source]):
    """A run of rows out of every head of a tensor, as they are stored.

    tensor     of n_heads * head_rows rows
    head_rows  rows of one head in `tensor`
    first      where in a head the run begins
    count      how many rows it has; the result has n_heads * count
    """

    name: str
    shape: tuple[int, ...]
    tensor: Source
    head_rows: int
    first: int
    count: int

    @property
    def type(self) -> GGMLType:
        return self.tensor.type

    @property
    def by_rows(self) -> bool:
        return self.tensor.by_rows

    def read_rows(self, start: int, stop: int) -> npt.NDArray[Any]:
        dtype = rows_dtype(self.type)
        runs = (self.tensor.read_rows(low, high) for low, high in self._runs(start, stop))
        return joined([rows.astype(dtype, copy=False) for rows in runs], (self.shape[-1],), dtype)

    def raw_rows(self, start: int, stop: int) -> npt.NDArray[np.uint8]:
        parts = [raw_rows(self.tensor, low, high) for low, high in self._runs(start, stop)]
        return joined(parts, (), np.dtype(np.uint8))

    def _runs(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Yield the rows of the tensor that rows `start` to `stop` are."""
        for head, low, high in split_rows(start, stop, self.count):
            base = head * self.head_rows + self.first
            yield base + low, base + high


@dataclass(frozen=True)
class TransposedHeads(Generic[Source]):
    """A run of rows out of every head of a tensor, transposed: (n_heads * n_cols, count), as floats.

    tensor, head_rows, first, count  as in HeadRows

    A row of the result is a column of the tensor: for any row, the run of its whole head is read.
    """

    name: str
    shape: tuple[int, ...]
    tensor: Source
    head_rows: int
    first: int
    count: int

    @property
    def type(self) -> GGMLType:
        return float_type(self.tensor)

    @property
    def by_rows(self) -> bool:
        return False

    def read_rows(self, start: int, stop: int) -> npt.NDArray[Any]:
        n_cols = self.tensor.shape[-1]
        rows = np.empty((stop - start, self.count), FLOAT_DTYPES[self.type])
        filled = 0
        for head, low, high in split_rows(start, stop, n_cols):
            base = head * self.head_rows + self.first
            run = self.tensor.read_rows(base, base + self.count)
            rows[filled : filled + high - low] = run.T[low:high]
            filled += high - low
        return rows

    def raw_rows(self, start: int, stop: int) -> npt.NDArray[np.uint8]:
        return self.read_rows(start, stop).reshape(-1).view(np.uint8)


def split_rows(start: int, stop: int, size: int) -> Iterator[tuple[int, int, int]]:
    """Yield (index, low, high) for every head, or matrix, of `size` rows that rows `start` to `stop` touch.

    >>> list(split_rows(3, 9, 4))
    [(0, 3, 4), (1, 0, 4), (2, 0, 1)]
    """
    while start < stop:
        index, low = divmod(start, size)
        high = min(size, low + stop - start)
        yield index, low, high
        start += high - low


def joined(parts: Sequence[npt.NDArray[Any]], row: tuple[int, ...], dtype: np.dtype) -> npt.NDArray[Any]:
    """Return `parts`, whose rows have the shape `row`, below each other; a contiguous single one as it is."""
    if len(parts) == 1:
        return np.ascontiguousarray(parts[0])
    out = np.empty((sum(map(len, parts)), *row), dtype)
    return np.concatenate(parts, out=out) if parts else out


def raw_rows(tensor: RowSource, start: int, stop: int) -> npt.NDArray[np.uint8]:
    """Return rows as the bytes of the tensor's type, uint8."""
    if tensor.type in FLOAT_DTYPES:
        rows = tensor.read_rows(start, stop).astype(FLOAT_DTYPES[tensor.type], copy=False)
        return np.ascontiguousarray(rows).reshape(-1).view(np.uint8)
    assert isinstance(tensor, SourceTensor), f"{tensor.name}: {tensor.type.name}, but no blocks"
    return tensor.raw_rows(start, stop)


def float_type(tensor: RowSource) -> GGMLType:
    """Return the type of a tensor's rows as they are read: its own, or F32 for a quantized one."""
    return tensor.type if tensor.type in FLOAT_DTYPES else F32
