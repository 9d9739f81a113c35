"""Mistakes between a base's tensor and a file's: rows that change places, data cut anew, bytes turned.

A move says for every row of the file from which row of the base it came. Where a tensor is a vector, its
elements move.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from convert.audit.expected import Floats32, read_rows
from convert.audit.measure import Indices
from gguf_tools.format.block_layouts import can_swap, swap_bytes
from gguf_tools.format.ggml_types import GGMLType
from quantize.fill.sources import FLOAT_DTYPES, SourceTensor
from quantize.formats import get_decoder

Move = Callable[[Indices], Indices]
"""Rows of the file -> the rows of the base that they hold."""

Rows = Callable[[Indices], Floats32]
"""Rows, by number -> what they should hold, float32 (n, n_cols)."""

MOST_WHOLE = 64 << 20
"""Weights of a matrix that is held in memory to be transposed; a larger one is not tried."""


def moved(source: SourceTensor, move: Move) -> Rows:
    """Give the rows of a tensor after a move; the elements of a vector."""
    if math.prod(source.shape[:-1]) > 1:
        return lambda rows: read_rows(source, move(rows))
    return lambda rows: read_rows(source, rows)[:, move(np.arange(source.shape[-1]))]


def within(size: int, first: int, count: int, move: Move) -> Move:
    """Move within a run of `count` rows of every head of `size` rows; the others stay."""

    def all_rows(rows: Indices) -> Indices:
        head, place = np.divmod(rows, size)
        inside = (place >= first) & (place < first + count)
        return np.where(inside, head * size + first + move(np.clip(place - first, 0, count - 1)), rows)

    return all_rows


def interleaved(count: int) -> Move:
    """Rows i and i + count / 2 of the base stand side by side in the file."""
    return lambda places: places // 2 + places % 2 * (count // 2)


def taken_apart(count: int) -> Move:
    """Rows that stand side by side in the base are count / 2 apart in the file."""
    return lambda places: 2 * (places % (count // 2)) + places // (count // 2)


def halves_turned(upper: int, lower: int) -> Move:
    """Heads of `upper` and then `lower` rows in the base have them the other way round in the file."""
    return lambda places: np.where(places < lower, upper + places, places - lower)


def one_below_the_other(n_heads: int, upper: int, lower: int) -> Move:
    """Heads have upper and lower rows in the base; the file has the upper rows of all heads first."""

    def move(rows: Indices) -> Indices:
        head, place = np.divmod(rows, upper)
        below, rest = np.divmod(rows - n_heads * upper, lower)
        size = upper + lower
        return np.where(rows < n_heads * upper, head * size + place, below * size + upper + rest)

    return move


def recut(source: SourceTensor, n_cols: int) -> Rows:
    """Give the data of a tensor, as they lie, cut into rows of another length."""

    def rows_of(rows: Indices) -> Floats32:
        old = source.shape[-1]
        out = np.empty((len(rows), n_cols), np.float32)
        for place, row in enumerate(rows.tolist()):
            first, last = row * n_cols // old, -(-(row + 1) * n_cols // old)
            data = source.read_rows(first, last).reshape(-1)
            out[place] = data[row * n_cols - first * old :][:n_cols]
        return out

    return rows_of


def transposed(source: SourceTensor, n_rows: int) -> Rows | None:
    """Give the rows of each matrix of `n_rows` rows, transposed and cut into rows of the same length.

    None for matrices too large to be held.
    """
    n_cols = source.shape[-1]
    if n_rows < 2 or n_rows * n_cols > MOST_WHOLE:
        return None

    def rows_of(rows: Indices) -> Floats32:
        out = np.empty((len(rows), n_cols), np.float32)
        for matrix in np.unique(rows // n_rows):
            whole = source.read_rows(int(matrix) * n_rows, int(matrix + 1) * n_rows).astype(np.float32)
            here = rows // n_rows == matrix
            out[here] = np.ascontiguousarray(whole.T).reshape(n_rows, n_cols)[rows[here] % n_rows]
        return out

    return rows_of


def in_other_byte_order(stored: SourceTensor, rows: Indices, type_: GGMLType) -> Floats32 | None:
    """Read rows of the file with their bytes the other way round; None for a type that has no such form."""
    if not can_swap(type_) or type_.rows_interleaved > 1:
        return None
    raw = np.concatenate([np.frombuffer(stored.raw_rows(row, row + 1), np.uint8) for row in rows.tolist()])
    swapped = swap_bytes(type_, raw).reshape(len(rows), -1)
    dtype = FLOAT_DTYPES.get(type_)
    values = get_decoder(type_)(swapped, stored.shape[-1]) if dtype is None else swapped.view(dtype)
    return np.nan_to_num(values.astype(np.float32), posinf=0, neginf=0)
