"""Second moments: sums of x x^T over the rows x that a matrix multiplies, one for every matrix of a stack.

Pieces of rows are multiplied and added up in float32: what is lost is far below what the diagonal is damped
by. A sum is cut into units of its own rows, each of which is one task: pieces and units are the same for any
number of threads, and so are the sums.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from forward.device import to_numpy
from forward.workers import Workers
from quantize.formats.base import Floats32

_STRIP_COLS = 512
"""Number of columns of a unit: its product of 16384 columns takes 32 MB."""

PAIR_BYTES = 22
"""Memory for each pair of columns of a matrix at most, as measured with 8192: in float32 its sums, those
crossed with the original's, what rounding reads of them and the step that makes up for what is before; and
strips on the way."""


@dataclass
class Moments:
    """The moments of a stack of matrices, on the device that computes.

    own     float32 (n_mats, n_cols, n_cols): sum of x x^T; the lower triangle is filled in by `whole`
    cross   the same shape: sum of t x^T, t what the original model's matrix multiplies where this one
            multiplies x; None where both are the same
    n_rows  rows that were added up, the same for all matrices
    """

    own: torch.Tensor
    cross: torch.Tensor | None
    n_rows: int = 0

    @classmethod
    def zeros(cls, n_mats: int, n_cols: int, device: torch.device, *, cross: bool) -> Moments:
        shape = n_mats, n_cols, n_cols
        own = torch.zeros(shape, device=device)
        return cls(own, torch.zeros_like(own) if cross else None)

    def add(self, x: torch.Tensor, originals: torch.Tensor | None, workers: Workers) -> None:
        """Add a piece of rows.

        x          float32 or bfloat16 (n_rows, n_mats, n_cols)
        originals  what the original model's matrices multiply, in the same shape; None where it is x
        """
        if not len(x):
            return
        x = x.float()
        originals = None if originals is None else originals.float()

        def take(unit: tuple[int, int]) -> None:
            mat, start = unit
            stop = min(start + _STRIP_COLS, x.shape[2])
            self.own[mat, start:stop, start:] += x[:, mat, start:stop].T @ x[:, mat, start:]
            if self.cross is not None and originals is not None:
                self.cross[mat, start:stop] += originals[:, mat, start:stop].T @ x[:, mat]

        for _ in workers.each(take, self._units()):
            pass
        self.n_rows += len(x)

    def merge(self, other: Moments) -> None:
        """Add another sum."""
        self.own += other.own
        if self.cross is not None and other.cross is not None:
            self.cross += other.cross
        self.n_rows += other.n_rows

    def whole(self, mat: int) -> Floats32:
        """Return sum x x^T of one matrix, both triangles of it, (n_cols, n_cols); on the CPU no copy."""
        own = to_numpy(self.own[mat])
        n_cols = len(own)
        for start in range(0, n_cols, _STRIP_COLS):
            stop = min(start + _STRIP_COLS, n_cols)
            own[stop:, start:stop] = own[start:stop, stop:].T
        return own

    def crossed(self, mat: int) -> Floats32 | None:
        """Return sum t x^T of one matrix, (n_cols, n_cols)."""
        return None if self.cross is None else to_numpy(self.cross[mat])

    def _units(self) -> Iterator[tuple[int, int]]:
        n_mats, n_cols, _ = self.own.shape
        for mat in range(n_mats):
            for start in range(0, n_cols, _STRIP_COLS):
                yield mat, start


@dataclass(frozen=True)
class Statistics:
    """Second moments of one matrix's inputs.

    own     float32 or float64 (n_cols, n_cols): sum of x x^T
    cross   sum of t x^T; None where t is x
    n_rows  rows that they stand for; a fraction of one where rows of others were taken in with less weight
    n_seen  rows of the matrix itself that were added up
    """

    own: npt.NDArray[np.floating[Any]]
    cross: Floats32 | None
    n_rows: float
    n_seen: int

    @classmethod
    def of(cls, moments: Moments, mat: int = 0) -> Statistics:
        return cls(moments.whole(mat), moments.crossed(mat), moments.n_rows, moments.n_rows)

    @classmethod
    def nothing(cls, n_cols: int) -> Statistics:
        """Return empty statistics, for a matrix whose input is never observed."""
        return cls(np.broadcast_to(0.0, (n_cols, n_cols)), None, 0, 0)

    def shrunk_towards(self, shared: Statistics, n_rows: float) -> Statistics:
        """Return these with `n_rows` rows that are like the mean of the shared ones."""
        if not shared.n_rows:
            return self
        share = np.float32(n_rows / shared.n_rows)
        cross = self.cross
        if cross is not None and shared.cross is not None:
            cross = cross + share * shared.cross
        return Statistics(self.own + share * shared.own, cross, self.n_rows + n_rows, self.n_seen)

    @property
    def is_finite(self) -> bool:
        # A column with NaN or infinity in one row has it in its own square.
        return bool(np.isfinite(np.diagonal(self.own)).all())

    def importances(self) -> npt.NDArray[np.float32]:
        """Return the mean square of each column, float32 (n_cols,), as an importance matrix has it."""
        squares = np.diagonal(self.own).astype(np.float32)
        return squares / np.float32(self.n_rows) if self.n_rows else np.ones_like(squares)
