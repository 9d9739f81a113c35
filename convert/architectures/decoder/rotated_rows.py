"""Rows of queries and keys in the order in which a file's architecture rotates them.

A checkpoint of these families rotates column i of a head of d columns together with column i + d/2. The
file's architecture ("llama", "deepseek") rotates neighbours. So the rows of q_proj and k_proj, weights and
biases, change places within each head:

    row 2j + s of the file = row s * d/2 + j of the checkpoint,  j = 0 .. d/2 - 1,  s = 0, 1

Whole rows move, with their scales, so it does not matter how the checkpoint stores them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from convert.architectures.arrange import OutputTensor, Renamed
from convert.weights.base import Weight
from quantize.fill.sources import joined, raw_rows, rows_dtype, split_rows


@dataclass(frozen=True)
class PairedRows(Renamed):
    """A matrix whose heads of `head_rows` rows have rows i and i + head_rows / 2 side by side."""

    head_rows: int

    def read_rows(self, start: int, stop: int) -> np.ndarray:
        dtype = rows_dtype(self.type)
        parts = []
        for low, high, offset, count in self._runs(start, stop):
            first, second = (
                self.weight.read_rows(low + half, high + half).astype(dtype, copy=False)
                for half in (0, self.head_rows // 2)
            )
            parts.append(_interleaved(first, second)[offset : offset + count])
        return joined(parts, (self.shape[-1],), dtype)

    def raw_rows(self, start: int, stop: int) -> np.ndarray:
        parts = []
        for low, high, offset, count in self._runs(start, stop):
            first, second = (
                raw_rows(self.weight, low + half, high + half).reshape(high - low, -1)
                for half in (0, self.head_rows // 2)
            )
            parts.append(_interleaved(first, second)[offset : offset + count].reshape(-1))
        return joined(parts, (), np.dtype(np.uint8))

    def _runs(self, start: int, stop: int) -> Iterator[tuple[int, int, int, int]]:
        """Yield (low, high, offset, count) for each head that rows `start` to `stop` touch.

        low, high      rows of the checkpoint in the first half of the head; those in its second half match
        offset, count  which of the interleaved rows are wanted
        """
        for head, low, high in split_rows(start, stop, self.head_rows):
            first = head * self.head_rows
            yield first + low // 2, first + -(-high // 2), low % 2, high - low


def _interleaved(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Return the rows first[0], second[0], first[1] ..."""
    both = np.empty((2 * len(first), *first.shape[1:]), first.dtype)
    both[0::2], both[1::2] = first, second
    return both


@dataclass(frozen=True)
class PairedVector(Renamed):
    """A vector with one number for each row of such a matrix."""

    head_rows: int

    def read_rows(self, start: int, stop: int) -> np.ndarray:
        heads = super().read_rows(start, stop)
        heads = heads.reshape(stop - start, -1, 2, self.head_rows // 2)
        return np.ascontiguousarray(heads.swapaxes(2, 3)).reshape(stop - start, -1)

    def raw_rows(self, start: int, stop: int) -> np.ndarray:
        return self.read_rows(start, stop).reshape(-1).view(np.uint8)


def paired(name: str, weights: Sequence[Weight], config: Any) -> OutputTensor:
    """Return the one weight, a matrix or a vector, with its rotated rows side by side."""
    (weight,) = weights
    kind = PairedRows if len(weight.shape) > 1 else PairedVector
    return kind(name, weight.shape, weight.type, weight, config.head_dim)
