"""The matrix products of feedback, in an order of sums that depends on nothing but the number of columns.

A library of linear algebra splits a product by the number of threads and by the number of rows. These
products don't: each sum runs over its columns in order, whatever other rows are there.

Arrays are flat, as kernels see them (quantize.formats.base): a matrix goes with the length of its rows.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from quantize.formats.base import Floats32, as_source
from quantize.rounding.base import PANEL
from quantize.simd.floats import ONE, ZERO
from quantize.simd.kernel import inlinable, inlined, kernel
from quantize.simd.lane_memory import FloatTile, float_tile, load, store, tail
from quantize.simd.lanes import LANES, splat
from quantize.simd.tiles import load_blocks, load_columns, store_columns

_WIDE = 2 * LANES
_AT_ONCE = 4


@kernel
def feed_back(
    errors: Floats32, n_errors: int, factor: Floats32, first: int, later: int, stop: int, work: Floats32
) -> None:
    """Take the errors of some columns off other columns: work -= errors @ factor.

    errors       (n_rows * n_errors,), of columns first .. first + n_errors - 1, at most PANEL
    factor       (n_cols * n_cols,)
    later, stop  the columns to change are later .. stop - 1, a multiple of LANES
    work         (n_rows * n_cols,), changed in place
    """
    n_rows = errors.size // n_errors
    n_cols = work.size // n_rows
    panel = np.empty(PANEL * _WIDE, np.float32)  # rows of the factor lie too far apart for the caches
    odd = (stop - later) % _WIDE
    for column in range(later, stop - odd, _WIDE):
        for i in range(n_errors):
            start = (first + i) * n_cols + column
            store(panel, i * _WIDE, load(factor, start))
            store(panel, i * _WIDE + LANES, load(factor, start + LANES))
        whole = n_rows - n_rows % _AT_ONCE
        for row in range(0, whole, _AT_ONCE):
            _change_rows(errors, n_errors, panel, row, _AT_ONCE, n_cols, work[column:])
        for row in range(whole, n_rows):
            _change_rows(errors, n_errors, panel, row, 1, n_cols, work[column:])
    if odd:
        for row in range(n_rows):
            _half_a_row(errors, n_errors, factor, first, row, n_cols, stop - odd, work)


@inlined
def _change_rows(
    errors: Floats32, n_errors: int, panel: Floats32, first: int, count: int, n_cols: int, work: Floats32
) -> None:
    """Change 32 columns of `count` rows, a constant: LLVM keeps the sums in registers.

    errors  of all rows
    work    all rows, from these columns of row 0 on
    """
    sums = float_tile(8)  # 2 * _AT_ONCE
    for k in range(2 * count):
        sums[k] = splat(ZERO)
    for i in range(n_errors):
        left, right = load(panel, i * _WIDE), load(panel, i * _WIDE + LANES)
        for r in range(count):
            error = errors[(first + r) * n_errors + i]
            sums[2 * r] = sums[2 * r] + left * error
            sums[2 * r + 1] = sums[2 * r + 1] + right * error
    for r in range(count):
        start = (first + r) * n_cols
        store(work, start, load(work, start) - sums[2 * r])
        store(work, start + LANES, load(work, start + LANES) - sums[2 * r + 1])


@inlinable
def _half_a_row(
    errors: Floats32,
    n_errors: int,
    factor: Floats32,
    first: int,
    row: int,
    n_cols: int,
    column: int,
    work: Floats32,
) -> None:
    """Change 16 columns of one row, by the same sums."""
    total = splat(ZERO)
    for i in range(n_errors):
        total += load(factor, (first + i) * n_cols + column) * errors[row * n_errors + i]
    start = row * n_cols + column
    store(work, start, load(work, start) - total)


@kernel
def pull(minus_errors: Floats32, hessian: Floats32, start: int, stop: int, pulls: Floats32) -> None:
    """Compute the part of e H in some columns, for the errors e of whole rows.

    H is symmetric, so that its rows stand for its columns: what is read lies side by side in memory.

    minus_errors  (n_rows * n_cols,), n_cols a multiple of LANES
    hessian       (n_cols * n_cols,)
    start, stop   the columns, at most PANEL and a multiple of LANES
    pulls         (n_rows * (stop - start),), filled
    """
    n = stop - start
    n_rows = pulls.size // n
    n_cols = minus_errors.size // n_rows
    errors, sums = float_tile(PANEL), float_tile(PANEL)
    for first in range(0, n_rows, LANES):
        for k in range(n):
            sums[k] = splat(ZERO)
        for other in range(0, n_cols, PANEL):
            count = min(PANEL, n_cols - other)
            load_columns(minus_errors, n_cols, first, other, count, errors)
            for k in range(0, n, _AT_ONCE):
                _pull_columns(errors, count, hessian[(start + k) * n_cols + other :], n_cols, tail(sums, k))
        store_columns(sums, n, first, 0, n, pulls)


@inlined
def _pull_columns(
    minus_errors: FloatTile, n_errors: int, hessian: Floats32, n_cols: int, sums: FloatTile
) -> None:
    """Take products of some errors off the sums of _AT_ONCE columns: LLVM keeps their own in registers.

    hessian  from the first of these errors on, in the row of the first of these columns
    """
    own = float_tile(4)  # _AT_ONCE
    for k in range(_AT_ONCE):
        own[k] = splat(ZERO)
    for i in range(n_errors):
        error = minus_errors[i]
        for k in range(_AT_ONCE):
            own[k] = own[k] + error * hessian[k * n_cols + i]
    for k in range(_AT_ONCE):
        sums[k] = sums[k] - own[k]


@kernel
def errors_of(moves: Floats32, upper: Floats32, n_cols: int, errors: Floats32) -> None:
    """Fill `errors` with the e of each row whose e @ upper are its moves, w' - v.

    moves, errors  (n_rows * n_cols,), n_cols a multiple of LANES and at most PANEL
    upper          (n_cols * n_cols,), upper triangular
    """
    n_rows = moves.size // n_cols
    rest = float_tile(PANEL)
    for first in range(0, n_rows, LANES):
        load_blocks(moves, first, n_cols, rest)
        for i in range(n_cols):
            error = rest[i] * (ONE / upper[i * n_cols + i])
            rest[i] = error
            for k in range(i + 1, n_cols):
                rest[k] = rest[k] - error * upper[i * n_cols + k]
        store_columns(rest, n_cols, first, 0, n_cols, errors)


@kernel
def add_squares(errors: Floats32, totals: npt.NDArray[np.float64]) -> None:
    """Add to each row's total the sum of the squares of its errors, (n_rows * n,), in order."""
    n = errors.size // totals.size
    for row in range(totals.size):
        total = totals[row]
        for i in range(row * n, (row + 1) * n):
            total += np.float64(errors[i]) * np.float64(errors[i])
        totals[row] = total


def errors_in(moves: Floats32, upper: Floats32) -> Floats32:
    """Compute what makes up for `moves` of a panel's columns, float32 (n_rows, n), by themselves.

    upper  float32 (n, n), C-contiguous, that of the panel
    """
    errors = np.empty(moves.shape, np.float32)
    errors_of(as_source(moves), as_source(upper), len(upper), errors.reshape(-1))
    return errors


def whitened(moves: Floats32, upper: Floats32) -> Floats32:
    """Compute errors with errors @ upper = moves: their squares add up to what the moves cost.

    moves    float32 (n_rows, n), n a multiple of LANES and at least one row; overwritten
    upper    float32 (n, n), upper triangular
    """
    n = moves.shape[1]
    errors = np.empty_like(moves)
    for start in range(0, n, PANEL):
        stop = min(start + PANEL, n)
        own = errors_in(moves[:, start:stop], np.ascontiguousarray(upper[start:stop, start:stop]))
        errors[:, start:stop] = own
        feed_back(as_source(own), stop - start, as_source(upper), start, stop, n, moves.reshape(-1))
    return errors
