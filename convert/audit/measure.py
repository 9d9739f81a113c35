"""Sums over rows of a file and of its base, from which errors, cosines and slopes follow.

Rows are read in strips. Each strip's sums are formed in blocks of columns, so that a block that was damaged
shows in a row that is otherwise whole. What remains in memory is three numbers a row.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from gguf_tools.format.tensors import TensorInfo
from quantize.fill.encode import STRIP_ELEMS
from quantize.fill.sources import SourceTensor

Floats = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]

BLOCK_COLS = 256
"""Columns of a block: those of a super-block, so that a block's scales are its own."""

LEAST_BLOCK = 32
RUNS_OF_A_MATRIX = 4
ROWS_OF_A_RUN = 8
RUNS_OF_A_TENSOR = 16
"""Fewest runs of rows that are read of a tensor when not all are, whatever number of matrices it has."""


@dataclass(frozen=True)
class Sums:
    """Sums of squares over rows or blocks, float64 arrays of one shape.

    wanted  of the base's weights
    found   of the file's
    lost    of their differences
    """

    wanted: Floats
    found: Floats
    lost: Floats

    @classmethod
    def of(cls, wanted: npt.NDArray[np.float32], found: npt.NDArray[np.float32]) -> Sums:
        """Sum over the last axis, of a few hundred columns: in float32, which loses a millionth."""
        parts = (wanted, found, found - wanted)
        return cls(*(np.einsum("...k,...k->...", x, x).astype(np.float64) for x in parts))

    @classmethod
    def joined(cls, parts: Sequence[Sums]) -> Sums:
        """Join sums of several strips, one after the other."""
        return cls(
            np.concatenate([part.wanted for part in parts]),
            np.concatenate([part.found for part in parts]),
            np.concatenate([part.lost for part in parts]),
        )

    def pick(self, index: npt.NDArray[np.bool_]) -> Sums:
        """Take some of them."""
        return Sums(self.wanted[index], self.found[index], self.lost[index])

    def by(self, group: Indices) -> Sums:
        """Sum over those of the same group, numbered from 0."""
        n_groups = int(group.max(initial=-1)) + 1
        parts = (self.wanted, self.found, self.lost)
        return Sums(*(np.bincount(group, part, n_groups).astype(np.float64) for part in parts))

    def over(self, axis: int | None = None) -> Sums:
        """Sum over an axis, or over everything."""
        return Sums(*(np.asarray(x.sum(axis=axis)) for x in (self.wanted, self.found, self.lost)))

    @property
    def relative(self) -> Floats:
        """Relative error sqrt(lost / wanted); 0 where nothing is lost, infinite where the base is zero."""
        lost = np.asarray(self.lost, np.float64)
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.where(lost > 0, np.sqrt(lost / self.wanted), 0.0)

    @property
    def product(self) -> Floats:
        """Sum of products of the base's weight and the file's."""
        return (self.wanted + self.found - self.lost) / 2

    @property
    def cosine(self) -> Floats:
        """Cosine of the angle between the base's weights and the file's; 0 where either is zero."""
        return _quotient(self.product, np.sqrt(self.wanted * self.found))

    @property
    def slope(self) -> Floats:
        """Factor by which the file's weights would come nearest to the base's: about 1 after encoding."""
        return _quotient(self.product, self.found)

    @property
    def scale(self) -> Floats:
        """Factor by which the base's weights would come nearest to the file's."""
        return _quotient(self.product, self.wanted)


def _quotient(a: Floats, b: Floats) -> Floats:
    return np.divide(a, b, out=np.zeros_like(np.asarray(a, np.float64)), where=b > 0)


@dataclass(frozen=True)
class RowSums:
    """A tensor's sums, row by row.

    info       the tensor, as it is in the file
    rows       numbers of the rows that were read, int64 (n,)
    sums       of each, (n,)
    odd        blocks of each row whose error is not what was expected, int64 (n,)
    n_blocks   blocks of a row
    nonfinite  weights of each row that are NaN or infinite in the file, int64 (n,)
    """

    info: TensorInfo
    rows: Indices
    sums: Sums
    odd: Indices
    n_blocks: int
    nonfinite: Indices

    @property
    def matrices(self) -> Indices:
        """The matrix of each row, int64 (n,)."""
        return self.rows // rows_of_a_matrix(self.info)

    def pick(self, index: npt.NDArray[np.bool_]) -> RowSums:
        """Take some of the rows."""
        return replace(
            self, rows=self.rows[index], sums=self.sums.pick(index), odd=self.odd[index],
            nonfinite=self.nonfinite[index],
        )  # fmt: skip


@dataclass(frozen=True)
class Ordinary:
    """Limits that blocks of a tensor keep if they hold what the base has.

    relative  largest relative error
    cosine    least cosine of the angle between the base's weights and the file's
    absolute  error that each weight may have besides, because small scales are coarse
    """

    relative: float
    cosine: float
    absolute: float

    def is_odd(self, sums: Sums, n_weights: int) -> npt.NDArray[np.bool_]:
        """Tell which sums, over so many weights each, are not of that kind."""
        coarse = self.absolute * math.sqrt(n_weights)
        large = np.sqrt(sums.lost) > self.relative * np.sqrt(sums.wanted) + coarse
        seen = sums.wanted > (4 * coarse) ** 2
        return large | (seen & (sums.cosine < self.cosine))


def rows_of_a_matrix(info: TensorInfo) -> int:
    return max(1, info.n_rows // max(1, info.n_mats))


def block_cols(n_cols: int) -> int:
    """Compute how many columns a block has: up to 256, and all where rows are not made of blocks of 32.

    >>> block_cols(4096), block_cols(1408), block_cols(90)
    (256, 128, 90)
    """
    common = math.gcd(n_cols, BLOCK_COLS)
    return common if common >= LEAST_BLOCK else n_cols


def runs_of(info: TensorInfo, *, every_row: bool) -> Iterator[tuple[int, int]]:
    """Yield the rows that are read, as (start, stop): all, or runs that are spread over each matrix.

    A run never crosses from one matrix into the next, and cuts no group of interleaved rows.
    """
    n_rows, group = rows_of_a_matrix(info), info.type.rows_interleaved
    n_mats = info.n_rows // n_rows
    length = -(-ROWS_OF_A_RUN // group) * group
    n_runs = max(RUNS_OF_A_MATRIX, RUNS_OF_A_TENSOR // n_mats)
    if every_row or n_rows <= n_runs * length:
        yield from ((mat * n_rows, (mat + 1) * n_rows) for mat in range(n_mats))
        return
    starts = [(n_rows - length) * run // (n_runs - 1) // group * group for run in range(n_runs)]
    for mat in range(n_mats):
        yield from ((mat * n_rows + start, mat * n_rows + start + length) for start in starts)


def strips_of(
    stored: SourceTensor, base: SourceTensor, info: TensorInfo, runs: Sequence[tuple[int, int]]
) -> Iterator[tuple[int, npt.NDArray[np.float32], npt.NDArray[np.float32]]]:
    """Yield (first row, the base's rows, the file's rows), float32 (n, n_cols), some at a time.

    Whole matrices are read at once where the base gives few rows as slowly as many.
    """
    group = math.lcm(info.type.rows_interleaved, base.type.rows_interleaved)
    step = max(1, STRIP_ELEMS // max(1, info.n_cols) // group) * group
    for start, stop in runs:
        length = step if base.by_rows else stop - start
        for first in range(start, stop, length):
            last = min(first + length, stop)
            wanted = base.read_rows(first, last)
            found = stored.read_rows(first, last)
            yield first, wanted.astype(np.float32, copy=False), found.astype(np.float32, copy=False)


def measure(
    stored: SourceTensor,
    base: SourceTensor,
    info: TensorInfo,
    runs: Sequence[tuple[int, int]],
    *,
    ordinary: Ordinary,
) -> RowSums:
    """Measure the rows of some runs; raises QuantError for a type that can't be decoded."""
    rows: list[Indices] = []
    sums: list[Sums] = []
    odd: list[Indices] = []
    nonfinite: list[Indices] = []
    cols = block_cols(info.n_cols)
    n_blocks = max(1, info.n_cols // cols)
    for first, wanted, found in strips_of(stored, base, info, runs):
        finite = np.isfinite(found)
        nonfinite.append((~finite).sum(axis=1))
        if nonfinite[-1].any():
            found = np.where(finite, found, np.float32(0))
        blocks = Sums.of(*(each.reshape(len(wanted), n_blocks, cols) for each in (wanted, found)))
        rows.append(np.arange(first, first + len(wanted)))
        sums.append(blocks.over(1))
        odd.append(ordinary.is_odd(blocks, cols).sum(axis=1))
    joined = (np.concatenate(each) for each in (odd, nonfinite))
    return RowSums(info, np.concatenate(rows), Sums.joined(sums), next(joined), n_blocks, next(joined))
