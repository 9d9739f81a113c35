"""Second moments of a tensor's inputs, in the form that rounding with feedback reads.

With H the moments, a row with errors e costs e H e^T. If H^-1 = U^T U with U upper triangular, the same cost
is the sum over columns of

    ((w'[i] - v[i]) / U[i, i])**2

where v are the values as stored and w' the weights after feedback: each column's error, divided by U[i, i]
and multiplied by row i of U, has been taken off the later columns. So columns can be rounded one after the
other, and each pays for itself alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from gguf_tools.errors import BadMoments
from quantize.formats.base import Floats32

Moments = npt.NDArray[np.float64]

AnyMoments = npt.NDArray[np.floating[Any]]

DAMP = 0.01
"""The share of the mean diagonal that is added to the diagonal: what the text did not show counts too."""

_SMALL = 128
"""Size up to which a triangular matrix is inverted at once."""

_STRIP = 256
"""Number of columns of a strip of the root."""


@dataclass(frozen=True, eq=False)
class Factor:
    """Second moments, scaled to a mean diagonal of 1 and damped, with what rounding needs of them.

    hessian      float32 (n, n), H itself
    upper        float32 (n, n), U with H^-1 = U^T U; zero below the diagonal
    mean         what the moments were divided by
    importances  float32 (n,), 1 / U[i, i]**2 scaled to a mean of 1: what an error costs once later columns
                 have made up for it as well as they can
    """

    hessian: Floats32
    upper: Floats32
    importances: Floats32
    mean: float

    _local: dict[int, Floats32] = field(default_factory=dict, repr=False)

    @property
    def size(self) -> int:
        return len(self.importances)

    def local_uppers(self, n: int) -> Floats32:
        """Return U of the moments of each n columns by themselves, float32 (size, n), one after the other.

        n    a divisor of the number of columns
        """
        if n not in self._local:
            blocks = self.hessian.reshape(self.size // n, n, self.size // n, n)
            own = np.einsum("iaib->iab", blocks).astype(np.float64)
            lower = np.linalg.cholesky(np.linalg.inv(own))
            self._local[n] = np.ascontiguousarray(lower.transpose(0, 2, 1)).reshape(-1, n).astype(np.float32)
        return self._local[n]

    @classmethod
    def of(cls, moments: AnyMoments, damp: float = DAMP) -> Factor:
        """Return the factor of moments, floats (n, n): the sum of x x^T over the inputs x, in any unit.

        A column that was never anything but zero gets the mean of the others' diagonal.

        damp    what is added to the diagonal, in units of its mean
        raises  BadMoments if the moments are not a square of finite numbers, or not positive definite even
                with `damp` added
        """
        if moments.ndim != 2 or moments.shape[0] != moments.shape[1]:
            raise BadMoments(f"second moments must be a square matrix, found shape {moments.shape}")
        if not np.isfinite(moments).all():
            row, column = np.argwhere(~np.isfinite(moments))[0]
            raise BadMoments(f"second moments of columns {row} and {column} are {moments[row, column]}")
        scaled, mean = _scaled(moments, damp)
        hessian = scaled.astype(np.float32)
        # The root needs float64. Its inverse does not: damping keeps the root's condition below 1e3.
        upper = _inverse_of_upper(_upper_root(scaled))
        costs = 1 / np.diag(upper).astype(np.float64) ** 2
        return cls(hessian, upper, (costs / costs.mean()).astype(np.float32), mean)


def _scaled(moments: AnyMoments, damp: float) -> tuple[Moments, float]:
    """Return moments with a mean diagonal of 1 and `damp` on top; dead columns count as the mean.

    The second is what they were divided by.
    """
    scaled = np.array(moments, np.float64)
    diagonal = np.diagonal(scaled).copy()
    if (diagonal < 0).any():
        column = int(np.argmax(diagonal < 0))
        raise BadMoments(f"the second moment of column {column} is {diagonal[column]}, below 0")
    seen = diagonal > 0
    diagonal[~seen] = diagonal[seen].mean() if seen.any() else 1.0
    mean = diagonal.mean()
    scaled /= mean
    np.fill_diagonal(scaled, diagonal / mean + damp)
    return scaled, float(mean)


def _upper_root(scaled: Moments) -> Floats32:
    """Return R, upper triangular, with scaled = R R^T; `scaled` is lost.

    That is Cholesky's factor of the matrix read backwards. It is made in place and in strips of columns: the
    library's takes three times the memory, and three times as long.
    """
    rest = scaled[::-1, ::-1]
    n = len(rest)
    for start in range(0, n, _STRIP):
        stop = min(start + _STRIP, n)
        try:
            corner = np.linalg.cholesky(rest[start:stop, start:stop])
        except np.linalg.LinAlgError:
            raise BadMoments(
                "second moments are not positive definite, even damped; give a longer text or more damping"
            ) from None
        rest[start:stop, start:stop] = corner
        strip = rest[stop:, start:stop] @ np.linalg.inv(corner).T
        rest[stop:, start:stop] = strip
        for first in range(stop, n, _STRIP):
            own = strip[first - stop : first - stop + _STRIP]
            rest[first:, first : first + _STRIP] -= strip[first - stop :] @ own.T
    return np.triu(scaled.astype(np.float32))


def _inverse_of_upper(root: Floats32) -> Floats32:
    """Return the inverse of an upper triangular matrix, made of those of its halves."""
    size = len(root)
    if size <= _SMALL:
        return np.triu(np.linalg.inv(root))
    half = size // 2
    inverse = np.zeros_like(root)
    inverse[:half, :half] = _inverse_of_upper(root[:half, :half])
    inverse[half:, half:] = _inverse_of_upper(root[half:, half:])
    inverse[:half, half:] = -inverse[:half, :half] @ root[:half, half:] @ inverse[half:, half:]
    return inverse
