"""Searching the base for what a file's rows hold: which matrix, which row, which columns; and factors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from convert.audit.expected import Floats32, read_rows
from convert.audit.measure import Indices
from quantize.fill.encode import STRIP_ELEMS
from quantize.fill.sources import SourceTensor

PROBES = 4
"""Rows of a matrix that are compared with the same rows of all others of its stack."""

NEAREST = 3
LEAST_MATCH = 0.35
"""Least cosine of a row, or column, and the one that it is taken for."""

MOST_SEARCHED = 256 << 20
"""Weights of the base that are searched for a row, around its own place."""

LEAST_LENGTH = 64
"""Fewest weights of a row, or a column, by which it is recognised among thousands."""


def _unit(rows: npt.NDArray[np.float32]) -> Floats32:
    lengths = np.linalg.norm(rows, axis=-1, keepdims=True)
    unit: Floats32 = np.divide(rows, lengths, out=np.zeros_like(rows), where=lengths > 0)
    return unit


def nearest_matrices(base: SourceTensor, rows: Indices, found: Floats32, n_rows: int, own: int) -> list[int]:
    """Find the matrices of a stack whose rows are nearest to those of one matrix of the file."""
    picked = np.unique(np.linspace(0, len(rows) - 1, PROBES).astype(np.int64))
    places, probes = rows[picked] % n_rows, _unit(found[picked])
    n_mats = int(np.prod(base.shape[:-1], dtype=np.int64)) // n_rows
    cosines = np.array([
        float((_unit(read_rows(base, places + matrix * n_rows)) * probes).sum(-1).mean())
        for matrix in range(n_mats)
    ])  # fmt: skip
    cosines[own] = -1
    return [int(matrix) for matrix in np.argsort(-cosines)[:NEAREST]]


def row_order(base: SourceTensor, rows: Indices, found: Floats32, n_rows: int) -> Indices | None:
    """Find the row of the base that each row is nearest to, in its own matrix; None if one is near to none.

    Rows too short to be told apart are not searched for.
    """
    n_cols = base.shape[-1]
    if n_cols < LEAST_LENGTH or n_rows < 2:
        return None
    probes = _unit(found)
    best = np.full(len(rows), -1.0)
    place = rows.copy()
    for matrix in np.unique(rows // n_rows):
        here = np.flatnonzero(rows // n_rows == matrix)
        reach = max(1, MOST_SEARCHED // n_cols // 2)
        low = max(int(matrix) * n_rows, int(rows[here].min()) - reach)
        high = min(int(matrix + 1) * n_rows, int(rows[here].max()) + reach)
        for first, strip in _strips(base, low, high):
            cosines = probes[here] @ _unit(strip).T
            nearest = cosines.argmax(axis=1)
            values = cosines[np.arange(len(here)), nearest]
            better = values > best[here]
            best[here[better]] = values[better]
            place[here[better]] = first + nearest[better]
    return place if best.min(initial=1) >= LEAST_MATCH else None


def _strips(base: SourceTensor, start: int, stop: int) -> Iterator[tuple[int, Floats32]]:
    step = max(1, 4 * STRIP_ELEMS // base.shape[-1])
    for first in range(start, stop, step):
        yield first, base.read_rows(first, min(first + step, stop)).astype(np.float32, copy=False)


def column_order(base: SourceTensor, rows: Indices, found: Floats32) -> Indices | None:
    """Find the column of the base that each column is nearest to; None unless they are another order of all.

    The same rows of both are compared, so there must be enough of them.
    """
    if len(rows) < LEAST_LENGTH:
        return None
    wanted = _unit(np.ascontiguousarray(read_rows(base, rows).T))
    probes = _unit(np.ascontiguousarray(found.T))
    order = np.concatenate([
        (probes[first : first + 1024] @ wanted.T).argmax(axis=1) for first in range(0, len(probes), 1024)
    ])  # fmt: skip
    is_order = len(np.unique(order)) > 0.9 * len(order)
    return order if is_order and (order != np.arange(len(order))).any() else None


# ---- factors

BLOCK = 128
"""Rows and columns of a block with a scale of its own, as checkpoints in FP8 have them."""


@dataclass(frozen=True)
class Fit:
    """Factors by which the base's weights come nearest to the file's.

    kind      a short name for programs
    text      what is wrong then
    relative  error that is left, of the weights times their factors
    """

    kind: str
    text: str
    relative: float


def fits(wanted: Floats32, found: Floats32) -> Iterator[Fit]:
    """Fit a factor for all weights, then one for each block, row and column.

    wanted, found  (n_rows, n_cols) of neighbouring rows that begin a block
    """
    n_rows, n_cols = wanted.shape
    ways = [
        ("scaled", "all weights are {low:.4g} times the base's", n_rows, n_cols),
        ("scales-missing", "each block of {rows} x {cols} weights is off by a factor of its own, {low:.3g} to"
         " {high:.3g}: the scales of the blocks were left out, or are others", BLOCK, BLOCK),
        ("row-scales", "each row is off by a factor of its own, {low:.3g} to {high:.3g}: scales of rows were"
         " left out, or are others", 1, n_cols),
        ("column-scales", "each column is off by a factor of its own, {low:.3g} to {high:.3g}, as a norm or"
         " activation-aware scales would make it", n_rows, 1),
    ]  # fmt: skip
    for kind, text, rows, cols in ways:
        if rows * cols > 1 and (kind == "scaled" or (rows < n_rows or cols < n_cols)):
            yield _fit(kind, text, wanted, found, (min(rows, n_rows), min(cols, n_cols)))


def _fit(kind: str, text: str, wanted: Floats32, found: Floats32, block: tuple[int, int]) -> Fit:
    rows, cols = block
    n_rows, n_cols = wanted.shape
    row_starts, col_starts = np.arange(0, n_rows, rows), np.arange(0, n_cols, cols)

    def summed(values: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
        by_row = np.add.reduceat(values.astype(np.float64), row_starts, axis=0)
        total: npt.NDArray[np.float64] = np.add.reduceat(by_row, col_starts, axis=1)
        return total

    squares, products = summed(wanted * wanted), summed(wanted * found)
    factors = np.divide(products, squares, out=np.ones_like(products), where=squares > 0)
    left = summed(found * found) - factors * products
    n_weights = wanted.size
    freedom = max(0.05, 1 - factors.size / n_weights)  # of fitted numbers, which fit noise too
    total = float((factors**2 * squares).sum())
    relative = float(np.sqrt(max(0.0, float(left.sum())) / freedom / total)) if total else np.inf
    low, high = float(factors.min()), float(factors.max())
    return Fit(kind, text.format(rows=rows, cols=cols, low=low, high=high), relative)
