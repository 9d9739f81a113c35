"""Sources: tensors of the input that are encoded again, or joined head by head; still unread.

Each is a SourceTensor that the encoder fills a file from. See fill/sources.py for heads that are picked or
transposed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from gguf_tools.format.ggml_types import F32, GGMLType
from quantize.fill.chunks import RowRange
from quantize.fill.encode import FillJob, encode_rows
from quantize.fill.sources import FLOAT_DTYPES, SourceTensor, float_type, split_rows
from quantize.formats import get_format
from quantize.importances.entries import ResolvedImportance


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
        rows = np.empty((stop - start, self.shape[-1]), FLOAT_DTYPES[float_type(self)])
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
