"""Sources: tensors of the input whose rows are picked, transposed or joined head by head; still unread.

Each is a SourceTensor that the encoder fills a file from, and reads what a row range needs and no more: of a
transposed tensor whole heads, one at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from gguf_tools.ggml_types import F32, GGMLType
from quantize.fill.chunks import RowRange
from quantize.fill.encode import FillJob, encode_rows
from quantize.fill.sources import FLOAT_DTYPES, SourceTensor
from quantize.formats import get_format
from quantize.importance import ResolvedImportance


@dataclass(frozen=True)
class HeadRows:
    """A run of rows out of every head of a tensor, as they are stored.

    tensor     of n_heads * head_rows rows
    head_rows  rows of one head in `tensor`
    first      where in a head the run begins
    count      how many rows it has; the result has n_heads * count
    """

    name: str
    shape: tuple[int, ...]
    tensor: SourceTensor
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
        return np.concatenate([self.tensor.read_rows(low, high) for low, high in self._runs(start, stop)])

    def raw_rows(self, start: int, stop: int) -> npt.NDArray[np.uint8]:
        return np.concatenate([self.tensor.raw_rows(low, high) for low, high in self._runs(start, stop)])

    def _runs(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        for head, low, high in split_rows(start, stop, self.count):
            base = head * self.head_rows + self.first
            yield base + low, base + high


@dataclass(frozen=True)
class TransposedHeads:
    """A run of rows out of every head of a tensor, transposed: (n_heads * n_cols, count), as floats.

    tensor, head_rows, first, count  as in HeadRows
    """

    name: str
    shape: tuple[int, ...]
    tensor: SourceTensor
    head_rows: int
    first: int
    count: int

    @property
    def type(self) -> GGMLType:
        return _float_type(self.tensor)

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


@dataclass(frozen=True)
class Encoded:
    """A tensor of floats as rows of a quantized type, encoded when they are read.

    importance  of its rows; a read crosses no border between its groups of rows
    """

    tensor: SourceTensor
    type: GGMLType
    importance: ResolvedImportance | None = None

    @property
    def name(self) -> str:
        return self.tensor.name

    @property
    def shape(self) -> tuple[int, ...]:
        return self.tensor.shape

    @property
    def by_rows(self) -> bool:
        return self.tensor.by_rows

    def read_rows(self, start: int, stop: int) -> npt.NDArray[Any]:
        codec = get_format(self.type)
        return codec.decode(self.raw_rows(start, stop).reshape(stop - start, -1), self.shape[-1])

    def raw_rows(self, start: int, stop: int) -> npt.NDArray[np.uint8]:
        """Return the rows as blocks; raises BadWeights as `encode_rows` does."""
        weighed = {} if self.importance is None else {self.name: self.importance}
        job = FillJob({self.name: self.tensor}, weighed)
        return encode_rows(RowRange(self.name, start, stop), self.type, job)


@dataclass(frozen=True)
class JoinedHeads:
    """Two tensors of the same row length, joined head by head: rows of `upper`, then rows of `lower`.

    upper_rows, lower_rows  rows of one head in each
    """

    name: str
    shape: tuple[int, ...]
    upper: SourceTensor
    upper_rows: int
    lower: SourceTensor
    lower_rows: int

    @property
    def type(self) -> GGMLType:
        """That of both, F32 when they differ."""
        return self.upper.type if self.upper.type == self.lower.type else F32

    @property
    def by_rows(self) -> bool:
        return self.upper.by_rows and self.lower.by_rows

    def read_rows(self, start: int, stop: int) -> npt.NDArray[Any]:
        rows = np.empty((stop - start, self.shape[-1]), FLOAT_DTYPES[_float_type(self)])
        filled = 0
        for tensor, low, high in self._runs(start, stop):
            rows[filled : filled + high - low] = tensor.read_rows(low, high)
            filled += high - low
        return rows

    def raw_rows(self, start: int, stop: int) -> npt.NDArray[np.uint8]:
        if self.upper.type != self.lower.type:
            return self.read_rows(start, stop).reshape(-1).view(np.uint8)
        return np.concatenate([tensor.raw_rows(low, high) for tensor, low, high in self._runs(start, stop)])

    def _runs(self, start: int, stop: int) -> Iterator[tuple[SourceTensor, int, int]]:
        border = self.upper_rows
        for head, low, high in split_rows(start, stop, self.upper_rows + self.lower_rows):
            if low < border:
                base = head * self.upper_rows
                yield self.upper, base + low, base + min(high, border)
            if high > border:
                base = head * self.lower_rows - border
                yield self.lower, base + max(low, border), base + high


def split_rows(start: int, stop: int, head_rows: int) -> Iterator[tuple[int, int, int]]:
    """Yield (head, low, high) for every head of `head_rows` rows that rows `start` to `stop` touch.

    >>> list(split_rows(3, 9, 4))
    [(0, 3, 4), (1, 0, 4), (2, 0, 1)]
    """
    while start < stop:
        head, low = divmod(start, head_rows)
        high = min(head_rows, low + stop - start)
        yield head, low, high
        start += high - low


def _float_type(tensor: SourceTensor) -> GGMLType:
    """Return the type of a tensor's rows as `read_rows` gives them."""
    return tensor.type if tensor.type in FLOAT_DTYPES else F32
