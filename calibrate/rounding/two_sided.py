"""Feedback on both sides: errors of a row are made up for in later columns, and then in later rows.

With G the second moments of the gradients at the outputs, an error E of the whole matrix costs tr(G E H E^T).
A few rows at a time are encoded under H. Their errors are carried on to the rows after them, as errors of
columns are to later columns, with G in the place of H. So damage goes where the loss of the model does not
look.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from calibrate.rounding.base import DEFAULT, PANEL, Effort, Rounder
from calibrate.rounding.factor import Factor
from calibrate.rounding.feedback import check_finite, check_fit, encode_rows
from calibrate.rounding.judge import costs_of, encode_stock, is_kept
from calibrate.rounding.products import feed_back, whitened
from calibrate.rounding.rounders import get_rounder
from gguf_tools.errors import ShapeError
from gguf_tools.format.ggml_types import GGMLType
from quantize.formats import get_format
from quantize.formats.base import Bytes, Floats32, Rows, as_source
from quantize.simd.lanes import LANES

OUTPUT_DAMP = 0.1
"""The share of the mean diagonal to add to moments of gradients, which are noisier than those of inputs."""

ROWS_AT_ONCE = LANES
"""Rows that are encoded before their errors are carried on.

One at a time would do 1 to 4 % less damage, and take sixteen times as long.
"""


def encode_side_by_side(
    matrices: Sequence[tuple[Rows, Factor]],
    type_: GGMLType,
    factor: Factor,
    effort: Effort = DEFAULT,
    stocks: Sequence[Bytes] | None = None,
) -> list[Bytes]:
    """Encode all rows of some matrices that multiply the same so that tr(G E H E^T) of each is small.

    Where the stock encoder's bytes do less damage, it returns those. A few rows of each are encoded at a
    time. That takes less time than one matrix after the other, because each step is the same for all their
    rows. A matrix' bytes do not depend on the matrices beside it.

    matrices  rows and output factor of each: rows (n_rows, n_cols) of quantize.formats.base.ROW_DTYPES, all
              of the matrix, because a row's bytes depend on the rows before it; the factor of the second
              moments G of the gradients at its n_rows outputs, damped by OUTPUT_DAMP
    factor    of the second moments H of the n_cols inputs
    stocks    the same rows as encode_stock makes them, for each matrix; None: they are made here
    returns   uint8 (n_rows, row bytes) of each, C-contiguous
    raises    what encode_compensated raises, and ShapeError if an output factor is not of n_rows
    """
    works = []
    for rows, output_factor in matrices:
        check_fit(rows, type_, factor)
        if output_factor.size != len(rows):
            found = f"second moments of the gradients of {output_factor.size} outputs"
            raise ShapeError(f"{type_.name}: {len(rows)} rows, but {found}")
        floats = np.ascontiguousarray(rows, np.float32)
        check_finite(floats, type_)
        works.append(_Matrix(floats, type_, _padded(output_factor.upper)))
    _round_rows(works, get_rounder(type_), factor, effort)
    for each in works:
        each.end()
    return [
        _better(each, stocks[number] if stocks else encode_stock(each.rows, type_, factor), type_, factor)
        for number, each in enumerate(works)
    ]


class _Matrix:
    """A matrix whose rows are encoded a few at a time.

    rows   float32 (n_rows, n_cols)
    upper  float32 (n, n), that of the outputs, made as large as a multiple of LANES
    data   uint8 (n_rows, row bytes), of the rows that are done
    """

    def __init__(self, rows: Floats32, type_: GGMLType, upper: Floats32) -> None:
        self.rows, self.upper = rows, upper
        self.data = np.empty((len(rows), type_.row_bytes(rows.shape[1])), np.uint8)
        self._work = _transposed(rows, len(upper))
        self._begin(0)

    @property
    def n_padded(self) -> int:
        """Number of rows that are encoded, with those that fill them up to a multiple of LANES."""
        return len(self.upper)

    def following(self, first: int) -> Floats32:
        """Copy rows with what earlier rows have carried on, float32 (ROWS_AT_ONCE, n_cols)."""
        start = first - self._start
        return np.ascontiguousarray(self._own[:, start : start + ROWS_AT_ONCE].T)

    def take(self, first: int, data: Bytes, moves: Floats32) -> None:
        """Store the bytes of these rows, and carry on how far they are off."""
        self.data[first : first + ROWS_AT_ONCE] = data[: len(self.rows) - first]
        start, size = first - self._start, self._own.shape[1]
        own = slice(start, start + ROWS_AT_ONCE)
        lost = whitened(_transposed(moves, ROWS_AT_ONCE), np.ascontiguousarray(self._panel[own, own]))
        self._errors[:, own] = lost
        feed_back(
            as_source(lost), ROWS_AT_ONCE, as_source(self._panel), start, own.stop, size,
            self._own.reshape(-1),
        )  # fmt: skip
        if own.stop == size:
            stop = self._start + size
            feed_back(
                as_source(self._errors), size, as_source(self.upper), self._start, stop, self.n_padded,
                self._work.reshape(-1),
            )  # fmt: skip
            self._begin(stop)

    def end(self) -> None:
        """Forget all but the rows and their bytes."""
        del self._work, self._own, self._errors, self._panel

    def _begin(self, start: int) -> None:
        """Begin a panel of rows."""
        self._start, stop = start, min(start + PANEL, self.n_padded)
        self._panel = np.ascontiguousarray(self.upper[start:stop, start:stop])
        self._own = np.ascontiguousarray(self._work[:, start:stop])
        self._errors = np.empty_like(self._own)


def _round_rows(matrices: Sequence[_Matrix], rounder: Rounder, factor: Factor, effort: Effort) -> None:
    """Fill the matrices' bytes, without a look at the stock encoder's."""
    decode = get_format(rounder.type).decode
    for first in range(0, max((each.n_padded for each in matrices), default=0), ROWS_AT_ONCE):
        active = [each for each in matrices if first < each.n_padded]
        now = np.concatenate([each.following(first) for each in active])
        data = encode_rows(now, rounder, factor, effort)
        moves = now - decode(data, now.shape[1])
        for number, each in enumerate(active):
            own = slice(number * ROWS_AT_ONCE, (number + 1) * ROWS_AT_ONCE)
            each.take(first, data[own], moves[own])


def _better(matrix: _Matrix, stock: Bytes, type_: GGMLType, factor: Factor) -> Bytes:
    """Choose between a matrix' own bytes and the stock encoder's."""
    ours, theirs = (_damage(matrix, each, type_, factor) for each in (matrix.data, stock))
    return matrix.data if is_kept(ours, theirs, at_equal_cost=False) else stock


def _damage(matrix: _Matrix, data: Bytes, type_: GGMLType, factor: Factor) -> float:
    """Compute tr(G E H E^T) of the errors E of a matrix' bytes."""
    moves = _transposed(matrix.rows - get_format(type_).decode(data, factor.size), matrix.n_padded)
    by_row = np.ascontiguousarray(whitened(moves, matrix.upper).T)
    del moves  # as large as all rows, of which there are to be few copies
    return float(costs_of(by_row, factor).sum())


def _padded(upper: Floats32) -> Floats32:
    """Fill a factor up to a multiple of LANES rows and columns; the added ones stand alone."""
    n = len(upper)
    padded = np.eye(-(-n // LANES) * LANES, dtype=np.float32)
    padded[:n, :n] = upper
    return padded


def _transposed(rows: Floats32, width: int) -> Floats32:
    """Transpose rows, with zeros added to the right: float32 (n_cols, width)."""
    columns = np.zeros((rows.shape[1], width), np.float32)
    columns[:, : len(rows)] = rows.T
    return columns
