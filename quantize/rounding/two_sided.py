"""Feedback on both sides: errors of a row are made up for in later columns, and then in later rows.

With G the second moments of the gradients at the outputs, an error E of the whole matrix costs tr(G E H E^T).
A few rows at a time are encoded under H. Their errors are carried on to the rows after them, as errors of
columns are to later columns, with G in the place of H. So damage goes where the loss of the model does not
look.

Rows can be encoded in any order. Those with the largest gradients come first, because nothing makes up for
the last ones. In queries and keys, whose gradients differ most from row to row, that takes a quarter off
the damage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt

from gguf_tools.errors import ShapeError
from gguf_tools.format.ggml_types import GGMLType
from quantize.formats import get_format
from quantize.formats.base import Bytes, Floats32, Rows, as_source
from quantize.rounding.base import DEFAULT, PANEL, Effort, Rounder
from quantize.rounding.factor import AnyMoments, Factor, inverse_root
from quantize.rounding.feedback import check_finite, check_fit, encode_rows
from quantize.rounding.products import feed_back, whitened
from quantize.rounding.rounders import get_rounder
from quantize.simd.lanes import LANES

OUTPUT_DAMP = 0.1
"""The share of the mean diagonal to add to moments of gradients, which are noisier than those of inputs."""

HEAD_ROWS = 256
"""The most rows of a matrix that is taken for a head."""


def rows_at_once(n_rows: int) -> int:
    """Choose how many rows of a matrix are encoded before their errors are carried on.

    Kernels work on LANES rows. Many heads are encoded side by side, so a few rows of each fill the lanes.
    Rows of a head have more in common than others: LANES at once do 9 % more damage than a quarter of that
    (queries of SmolLM2-135M). With larger matrices, one at a time would do 1 to 4 % less damage, and take
    sixteen times as long.
    """
    return LANES // 4 if n_rows <= HEAD_ROWS else LANES


@dataclass(frozen=True, eq=False)
class OutputFactor:
    """The second moments G of the gradients at a matrix' outputs, in the form that feedback reads.

    order  int (n,), the rows as they are encoded: the largest gradients first
    upper  float32 (n, n), U of G in that order, as `Factor` has it
    """

    order: npt.NDArray[np.intp]
    upper: Floats32

    @property
    def size(self) -> int:
        return len(self.order)

    @property
    def n_padded(self) -> int:
        """Number of rows that are encoded, with those that fill them up to a multiple of LANES."""
        return -(-self.size // LANES) * LANES

    def padded_upper(self) -> Floats32:
        """Fill U up to n_padded rows and columns; the added ones stand alone."""
        padded = np.eye(self.n_padded, dtype=np.float32)
        padded[: self.size, : self.size] = self.upper
        return padded

    def in_order(self, rows: Floats32) -> Floats32:
        """Transpose rows in the order in which they are encoded, float32 (n_cols, n_padded)."""
        columns = np.zeros((rows.shape[1], self.n_padded), np.float32)
        for place, row in enumerate(self.order):
            columns[:, place] = rows[row]
        return columns

    def whitened(self, errors: Floats32) -> Floats32:
        """Compute rows F with F^T F = E^T G E of errors E (n_rows, n_cols): float32 (n_padded, n_cols)."""
        return np.ascontiguousarray(whitened(self.in_order(errors), self.padded_upper()).T)

    @classmethod
    def of(cls, moments: AnyMoments, damp: float = OUTPUT_DAMP) -> Self:
        """Factorize moments, floats (n, n): the sum of g g^T over gradients g, in any unit.

        damp    what is added to the diagonal, in units of its mean
        raises  BadMoments, see `Factor.of`
        """
        order = np.argsort(-np.diagonal(moments), kind="stable")
        upper, _ = inverse_root(moments[np.ix_(order, order)], damp)
        return cls(order, upper)


def encode_side_by_side(
    matrices: Sequence[tuple[Rows, OutputFactor]],
    type_: GGMLType,
    factor: Factor,
    effort: Effort = DEFAULT,
) -> list[Bytes]:
    """Encode all rows of some matrices that multiply the same so that tr(G E H E^T) of each is small.

    A few rows of each are encoded at a time. That takes less time than one matrix after the other, because
    each step is the same for all their rows. A matrix' bytes do not depend on the matrices beside it.

    matrices  rows and output factor of each: rows (n_rows, n_cols) of quantize.formats.base.ROW_DTYPES, all
              of the matrix, because a row's bytes depend on the rows before it; the factor of the second
              moments G of the gradients at its n_rows outputs
    factor    of the second moments H of the n_cols inputs
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
        works.append(_Matrix(floats, type_, output_factor))
    _round_rows(works, get_rounder(type_), factor, effort)
    return [each.data for each in works]


class _Matrix:
    """A matrix whose rows are encoded a few at a time.

    order      int (n_rows,), the rows as they are encoded
    n_padded   number of rows that are encoded, see `OutputFactor`
    upper      float32 (n, n), that of the outputs, made as large as a multiple of LANES
    n_at_once  rows that are encoded before their errors are carried on
    data       uint8 (n_rows, row bytes), of the rows that are done
    """

    def __init__(self, rows: Floats32, type_: GGMLType, outputs: OutputFactor) -> None:
        self.order, self.n_padded, self.upper = outputs.order, outputs.n_padded, outputs.padded_upper()
        self.n_at_once = rows_at_once(len(rows))
        self.data = np.empty((len(rows), type_.row_bytes(rows.shape[1])), np.uint8)
        self._work = outputs.in_order(rows)
        self._begin(0)

    @property
    def n_steps(self) -> int:
        """Number of steps in which all rows are encoded."""
        return self.n_padded // self.n_at_once

    def following(self, step: int) -> Floats32:
        """Copy the rows of a step, with what earlier rows have carried on, float32 (n_at_once, n_cols)."""
        start = step * self.n_at_once - self._start
        return np.ascontiguousarray(self._own[:, start : start + self.n_at_once].T)

    def take(self, step: int, data: Bytes, moves: Floats32) -> None:
        """Store the bytes of a step's rows, and carry on how far they are off."""
        first = step * self.n_at_once
        done = self.order[first : first + self.n_at_once]
        self.data[done] = data[: len(done)]
        start, size = first - self._start, self._own.shape[1]
        stop = start + self.n_at_once
        # Kernels work on LANES rows. The others around these have no errors.
        window = slice(start - start % LANES, start - start % LANES + LANES)
        own = slice(start - window.start, stop - window.start)
        moved = np.zeros((moves.shape[1], LANES), np.float32)
        moved[:, own] = moves.T
        lost = whitened(moved, np.ascontiguousarray(self._panel[window, window]))
        lost[:, own.stop :] = 0
        self._errors[:, window] += lost
        later = stop - stop % LANES
        feed_back(
            as_source(lost), LANES, as_source(self._panel), window.start, later, size, self._own.reshape(-1)
        )
        if stop == size:
            end = self._start + size
            feed_back(
                as_source(self._errors), size, as_source(self.upper), self._start, end, self.n_padded,
                self._work.reshape(-1),
            )  # fmt: skip
            self._begin(end)

    def _begin(self, start: int) -> None:
        """Begin a panel of rows."""
        self._start, stop = start, min(start + PANEL, self.n_padded)
        self._panel = np.ascontiguousarray(self.upper[start:stop, start:stop])
        self._own = np.ascontiguousarray(self._work[:, start:stop])
        self._errors = np.zeros_like(self._own)


def _round_rows(matrices: Sequence[_Matrix], rounder: Rounder, factor: Factor, effort: Effort) -> None:
    """Fill the matrices' bytes."""
    decode = get_format(rounder.type).decode
    for step in range(max((each.n_steps for each in matrices), default=0)):
        active = [each for each in matrices if step < each.n_steps]
        now = np.concatenate([each.following(step) for each in active])
        data = encode_rows(now, rounder, factor, effort)
        moves = now - decode(data, now.shape[1])
        ends = np.cumsum([each.n_at_once for each in active])[:-1]
        for each, own, moved in zip(active, np.split(data, ends), np.split(moves, ends), strict=True):
            each.take(step, own, moved)
