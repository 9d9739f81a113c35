"""Is the error of a tensor what its type makes? Rows and matrices whose is not, told and made sure of.

What looks odd by the numbers of the whole tensor may be a row with outliers, or an expert of another spread.
So rows and matrices that look odd are encoded anew themselves before they count as bad.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from convert.audit.expected import (
    PLAIN,
    Expected,
    Rise,
    as_encoded,
    expect,
    read_rows,
)
from convert.audit.measure import Indices, RowSums, Sums, block_cols
from gguf_tools.format.tensors import TensorInfo
from quantize.fill.sources import FLOAT_DTYPES, SourceTensor, consecutive_runs

MOST_ENCODED = 4 << 20
"""Weights of odd rows that are encoded anew at most; of more rows, what holds of these is taken to hold."""

_SUSPECT = 0.85
"""Share of a bound from which a matrix is encoded itself: rows of a tensor are not all alike."""


@dataclass(frozen=True)
class Pair:
    """A tensor of the file and what the base has for it.

    info      as it is in the file
    stored    the file's
    base      the base's, of as many rows and columns
    expected  what the type makes of the base's
    rise      how far its encoder may depart from the plain one; that is known once all tensors were sampled
    """

    info: TensorInfo
    stored: SourceTensor
    base: SourceTensor
    expected: Expected
    rise: Rise = PLAIN

    @property
    def is_float(self) -> bool:
        return self.info.type in FLOAT_DTYPES


def bad_rows(pair: Pair, measured: RowSums) -> Indices:
    """Return the rows that do not hold what the base has, as the type would have it."""
    odd = measured.rows[measured.odd > 0]
    bad, astray = (odd, odd) if pair.is_float else _confirmed(pair, odd)
    bad = np.union1d(bad, measured.rows[measured.nonfinite > 0])
    rest = measured.pick(~np.isin(measured.rows, astray) & (measured.nonfinite == 0))
    if not len(rest.rows):
        return bad
    all_suspect = pair.rise == PLAIN and not pair.expected.is_plain
    suspects = np.unique(rest.matrices) if all_suspect else _odd_matrices(pair, rest)
    off = [matrix for matrix in suspects if _is_off(pair, rest, int(matrix))]
    return np.union1d(bad, rest.rows[np.isin(rest.matrices, off)])


def _odd_matrices(pair: Pair, measured: RowSums) -> Indices:
    """Return the matrices whose error or slope is not that of the tensor's sample."""
    expected, rise = pair.expected, pair.rise
    sums = measured.sums.by(measured.matrices)
    n_weights = pair.info.n_cols * np.bincount(measured.matrices)
    coarse = expected.limits.absolute * np.sqrt(n_weights)
    largest = _SUSPECT * rise.largest(expected)
    large = np.sqrt(sums.lost) > largest * np.sqrt(sums.wanted) + coarse
    leaning = np.abs(sums.slope - expected.slope) > _SUSPECT * rise.steepest(expected)
    return np.flatnonzero(large | (leaning & (sums.wanted > (4 * coarse) ** 2)))


def _is_off(pair: Pair, measured: RowSums, matrix: int) -> bool:
    """Whether the error or the slope of a matrix is not what encoding that very matrix makes."""
    rows = measured.rows[measured.matrices == matrix]
    group = pair.info.type.rows_interleaved
    whole = [run for run in consecutive_runs(rows) if run[0] % group == 0 and run[1] % group == 0]
    if pair.is_float or not whole:
        return True
    expected = expect(pair.info, pair.stored, pair.base, whole)
    return not expected.is_plain and _exceeds(expected, pair.rise)


def _exceeds(expected: Expected, rise: Rise) -> bool:
    total = expected.measured
    if float(total.wanted) == 0:
        return bool(total.found > 0)
    leaning = abs(float(total.slope) - expected.slope) > rise.steepest(expected)
    return float(total.relative) > rise.largest(expected) or leaning


def _confirmed(pair: Pair, odd: Indices) -> tuple[Indices, Indices]:
    """Return those of the odd rows that are odd beside what encoding these rows makes.

    The second are those of them that do not resemble the base's. Others may be of a matrix that is off as a
    whole.
    """
    info, group = pair.info, pair.info.type.rows_interleaved
    most = max(group, MOST_ENCODED // max(1, info.n_cols))
    chosen = odd if len(odd) <= most else odd[np.linspace(0, len(odd) - 1, most).astype(np.int64)]
    if group > 1:
        chosen = np.unique((chosen // group * group)[:, None] + np.arange(group))
    wanted, found = read_rows(pair.base, chosen), read_rows(pair.stored, chosen)
    encoded = as_encoded(info.type, wanted) if len(chosen) else None
    if encoded is None:
        return odd, odd
    cols = block_cols(info.n_cols)
    plain, stored = (
        Sums.of(wanted.reshape(len(wanted), -1, cols), each.reshape(len(wanted), -1, cols))
        for each in (encoded[1], np.nan_to_num(found, posinf=0, neginf=0))
    )
    coarse = pair.expected.limits.absolute * np.sqrt(cols)
    made = np.maximum(np.sqrt(plain.lost), pair.expected.usual * np.sqrt(plain.wanted))
    row = 1.0 if pair.expected.has_plain_rows(pair.rise) else pair.rise.row
    large = np.sqrt(stored.lost) > row * made + coarse
    resembling = stored.cosine >= pair.rise.cosine * plain.cosine
    astray = (plain.cosine > 0) & ~resembling & (plain.wanted > (4 * coarse) ** 2)
    bad, strange = (chosen[each.any(axis=1)] for each in (large | astray, astray))
    if len(chosen) < len(odd) and len(bad) > 0.9 * len(chosen):
        return odd, (odd if len(strange) > 0.9 * len(bad) else strange)
    return np.intersect1d(bad, odd), np.intersect1d(strange, odd)
