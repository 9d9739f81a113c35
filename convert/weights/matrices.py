"""Splits a range of rows over a stack of matrices into one range per matrix."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod


@dataclass(frozen=True, slots=True)
class Part:
    """The rows of one matrix in a row range over a stack.

    matrix              which one
    first_row, last_row the range in it
    rows                the same rows counted from the beginning of the whole range
    """

    matrix: int
    first_row: int
    last_row: int
    rows: slice


def split_matrices(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Part]:
    """Yield what rows `start` to `stop`, counted over all matrices of `shape`, are of each matrix.

    >>> [(part.matrix, part.first_row, part.last_row) for part in split_matrices((3, 4, 8), 3, 9)]
    [(0, 3, 4), (1, 0, 4), (2, 0, 1)]
    """
    n_rows = shape[-2] if len(shape) > 1 else 1
    assert prod(shape) or start == stop, shape
    row = start
    while row < stop:
        matrix, first = divmod(row, n_rows)
        last = min(n_rows, first + stop - row)
        yield Part(matrix, first, last, slice(row - start, row - start + last - first))
        row += last - first
