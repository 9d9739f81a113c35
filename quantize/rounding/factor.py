"""Second moments of a tensor's inputs, in the form that rounding with feedback reads.

With H the moments, a row with errors e costs e H e^T. If H^-1 = U^T U with U upper triangular, the same cost
is the sum over columns of

    ((w'[i] - v[i]) / U[i, i])**2

where v are the values as stored and w' the weights after feedback: each column's error, divided by U[i, i]
and multiplied by row i of U, has been taken off the later columns. So columns can be rounded one after the
other, and each pays for itself alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from gguf_tools.errors import BadMoments
from quantize.formats.base import Floats32

Moments = npt.NDArray[np.float64]

AnyMoments = npt.NDArray[np.floating[Any]]

Result = TypeVar("Result")

DAMP = 0.01
"""The share of the mean diagonal that is added to the diagonal: what the text did not show counts too."""

_NOTHING = 1e-6
"""Cost of a column of padding, in units of the mean diagonal: 0 could not be factorized."""

_STRIP = 256
"""Number of columns of a strip of a triangular matrix."""

_SUMMED = 1024
"""Columns of a product in float32; sums of more are float64."""

_TASK_ROWS = 1024
"""Rows of a strip that are one task. The number decides how products are rounded, not who computes them."""


class Each(Protocol):
    """Does tasks in any order, and yields what they return in theirs: `map`, or a pool of threads."""

    def __call__(self, task: Callable[[int], Result], items: Iterable[int], /) -> Iterable[Result]: ...


@dataclass(frozen=True, eq=False)
class Factor:
    """Second moments, scaled to a mean diagonal of 1 and damped, with what rounding needs of them.

    hessian      float32 (n, n), H itself
    upper        float32 (n, n), U with H^-1 = U^T U; zero below the diagonal
    mean         what the moments were divided by
    importances  float32 (n,), 1 / U[i, i]**2 scaled to a mean of 1 without padding: what an error costs once
                 later columns have made up for it as well as they can
    """

    hessian: Floats32
    upper: Floats32
    importances: Floats32
    mean: float

    _local: dict[int, Floats32] = field(default_factory=dict, repr=False)
    _corners: dict[tuple[str, int, int], Floats32] = field(default_factory=dict, repr=False)

    @property
    def size(self) -> int:
        return len(self.importances)

    def panel(self, start: int, stop: int) -> Panel:
        """Take the columns start .. stop - 1."""
        return Panel(self, start, stop)

    def corner(self, of: Literal["hessian", "upper"], start: int, stop: int) -> Floats32:
        """Copy H or U of the columns start .. stop - 1, once: float32 (n, n), C-contiguous.

        Every row that is rounded reads them, and the whole rows of a large matrix lie too far apart.
        """
        if (of, start, stop) not in self._corners:
            whole = self.hessian if of == "hessian" else self.upper
            self._corners[of, start, stop] = np.ascontiguousarray(whole[start:stop, start:stop])
        return self._corners[of, start, stop]

    def local_uppers(self, n: int) -> Floats32:
        """Compute U of the moments of each n columns by themselves, float32 (size, n), one after the other.

        n    a divisor of the number of columns
        """
        if n not in self._local:
            blocks = self.hessian.reshape(self.size // n, n, self.size // n, n)
            own = np.einsum("iaib->iab", blocks).astype(np.float64)
            lower = np.linalg.cholesky(np.linalg.inv(own))
            self._local[n] = np.ascontiguousarray(lower.transpose(0, 2, 1)).reshape(-1, n).astype(np.float32)
        return self._local[n]

    @classmethod
    def of(
        cls,
        moments: AnyMoments,
        damp: float = DAMP,
        n_real: int | None = None,
        *,
        overwrite: bool = False,
        each: Each = map,
    ) -> Factor:
        """Factorize moments, floats (n, n): the sum of x x^T over the inputs x, in any unit.

        A column that was never anything but zero gets the mean of the others' diagonal: another text may show
        it. Columns of padding never will, so errors there cost next to nothing.

        damp       what is added to the diagonal, in units of its mean
        n_real     columns without padding, which is behind them; None: all
        overwrite  keep the Hessian where the moments are, which are float32
        each       does the parts of the work; the result does not depend on it
        raises     BadMoments if the moments are not a square of finite numbers, or not positive definite even
                   with `damp` added
        """
        scaled = _Scaled.of(moments, damp, n_real)
        upper = _inverse_root(scaled, each)
        costs = 1 / np.diag(upper).astype(np.float64) ** 2
        importances = (costs / costs[~scaled.is_padding].mean()).astype(np.float32)
        hessian = moments if overwrite else np.empty(moments.shape, np.float32)
        scaled.round_to(hessian)
        return cls(hessian, upper, importances, scaled.mean)


def inverse_root(moments: AnyMoments, damp: float, each: Each = map) -> tuple[Floats32, float]:
    """Return U with (H / m + damp I)^-1 = U^T U, float32 (n, n), and m, the mean diagonal of the moments H.

    raises  BadMoments, see `Factor.of`
    """
    scaled = _Scaled.of(moments, damp)
    return _inverse_root(scaled, each), scaled.mean


def damped_inverse(moments: AnyMoments, damp: float, each: Each = map) -> tuple[Floats32, float]:
    """Return (H / m + damp I)^-1, float32 (n, n), and m, the mean diagonal of the moments H.

    raises  BadMoments, see `Factor.of`
    """
    upper, mean = inverse_root(moments, damp, each)
    inverse, size = np.empty_like(upper), len(upper)

    def take(start: int) -> None:
        stop = min(start + _STRIP, size)
        np.matmul(upper[:stop, start:stop].T, upper[:stop, start:], out=inverse[start:stop, start:])
        inverse[stop:, start:stop] = inverse[start:stop, stop:].T

    _do(each, take, range(0, size, _STRIP))
    return inverse, mean


@dataclass(frozen=True, eq=False)
class Panel:
    """Columns start .. stop - 1 of a factor: what a rounder sees of it."""

    factor: Factor
    start: int
    stop: int

    @property
    def columns(self) -> slice:
        return slice(self.start, self.stop)

    @property
    def importances(self) -> Floats32:
        """The factor's importances of these columns, float32 (n,)."""
        return self.factor.importances[self.columns]

    @property
    def upper(self) -> Floats32:
        """The factor's U of these columns, float32 (n, n), C-contiguous."""
        return self.factor.corner("upper", self.start, self.stop)

    @property
    def hessian(self) -> Floats32:
        """The factor's H of these columns, float32 (n, n), C-contiguous."""
        return self.factor.corner("hessian", self.start, self.stop)

    def local_uppers(self, n: int) -> Floats32:
        """Compute U of each n of these columns by themselves, float32 (columns, n)."""
        return self.factor.local_uppers(n)[self.columns]


@dataclass(frozen=True)
class _Scaled:
    """Moments with a mean diagonal of 1 and damping on top, computed in float64 a strip at a time.

    moments     floats (n, n), as they are given
    diagonal    float64 (n,), scaled and damped
    mean        what moments are divided by
    is_padding  bool (n,)
    """

    moments: AnyMoments
    diagonal: npt.NDArray[np.float64]
    mean: float
    is_padding: npt.NDArray[np.bool_]

    @classmethod
    def of(cls, moments: AnyMoments, damp: float, n_real: int | None = None) -> _Scaled:
        """Scale and damp; dead columns count as the mean, and padding counts as nothing."""
        if moments.ndim != 2 or moments.shape[0] != moments.shape[1]:
            raise BadMoments(f"second moments must be a square matrix, found shape {moments.shape}")
        for start in range(0, len(moments), _STRIP):
            finite = np.isfinite(moments[start : start + _STRIP])
            if not finite.all():
                row, column = np.argwhere(~finite)[0]
                value = moments[start + row, column]
                raise BadMoments(f"second moments of columns {start + row} and {column} are {value}")
        diagonal = np.diagonal(moments).astype(np.float64)
        if (diagonal < 0).any():
            column = int(np.argmax(diagonal < 0))
            raise BadMoments(f"the second moment of column {column} is {diagonal[column]}, below 0")
        seen = diagonal > 0
        diagonal[~seen] = diagonal[seen].mean() if seen.any() else 1.0
        is_padding = ~seen & (np.arange(len(seen)) >= (len(seen) if n_real is None else n_real))
        mean = diagonal[~is_padding].mean()
        scaled = np.where(is_padding, _NOTHING, diagonal / mean + damp)
        return cls(moments, scaled, float(mean), is_padding)

    def round_to(self, rounded: Floats32) -> None:
        """Round all of them to float32 (n, n); this may be where the moments are."""
        for start in range(0, len(rounded), _STRIP):
            rows = slice(start, start + _STRIP)
            rounded[rows] = self.moments[rows].astype(np.float64) / self.mean
        np.fill_diagonal(rounded, self.diagonal)

    def strip(self, start: int, stop: int) -> Moments:
        """Return columns start .. stop - 1 from the top down to the diagonal, (stop, stop - start)."""
        strip = self.moments[:stop, start:stop].astype(np.float64) / self.mean
        np.fill_diagonal(strip[start:], self.diagonal[start:stop])
        return strip


def _inverse_root(scaled: _Scaled, each: Each) -> Floats32:
    """Compute the upper triangular U with scaled^-1 = U^T U."""
    root = _upper_root(scaled, each)
    _invert_upper(root, each)
    return root


def _do(each: Each, task: Callable[[int], object], items: Iterable[int]) -> None:
    for _ in each(task, items):
        pass


def _upper_root(scaled: _Scaled, each: Each) -> Floats32:
    """Compute the upper triangular R with scaled = R R^T, in strips of columns from the right.

    What is finished is float32, and so are products of it; their sums and the corners, where digits cancel,
    are float64. With damping of 0.01, the inverse is exact to 1e-4 of its largest number. In float64,
    everything takes nearly three times as long.
    """
    n = len(scaled.moments)
    root = np.zeros((n, n), np.float32)
    for start in reversed(range(0, n, _STRIP)):
        stop = min(start + _STRIP, n)
        rest, right = scaled.strip(start, stop), root[start:stop]

        def take_off(first: int, rest: Moments = rest, right: Floats32 = right, stop: int = stop) -> None:
            rows = slice(first, min(first + _TASK_ROWS, stop))
            for left in range(stop, n, _SUMMED):
                columns = slice(left, left + _SUMMED)
                rest[rows] -= root[rows, columns] @ right[:, columns].T

        _do(each, take_off, range(0, stop, _TASK_ROWS))
        try:
            # Cholesky's factor is a lower one, so the corner is read backwards.
            corner = np.linalg.cholesky(rest[start:][::-1, ::-1])[::-1, ::-1]
        except np.linalg.LinAlgError:
            raise BadMoments(
                "second moments are not positive definite, even damped; give a longer text or more damping"
            ) from None
        root[start:stop, start:stop] = corner
        root[:start, start:stop] = rest[:start].astype(np.float32) @ np.linalg.inv(corner).T.astype(
            np.float32
        )
    return root


def _invert_upper(root: Floats32, each: Each) -> None:
    """Invert an upper triangular matrix R in place, in strips of columns from the left.

    With V the inverse of what is left of a strip and C that of its corner, the strip becomes -V R C above the
    corner.
    """
    size = len(root)
    for start in range(0, size, _STRIP):
        columns = slice(start, start + _STRIP)
        corner = np.triu(np.linalg.inv(root[columns, columns]))
        root[columns, columns] = corner
        above = root[:start, columns] @ -corner

        def take(first: int, above: Floats32 = above, columns: slice = columns) -> None:
            rows = slice(first, min(first + _TASK_ROWS, len(above)))
            root[rows, columns] = root[rows, first : len(above)] @ above[first:]

        _do(each, take, range(0, start, _TASK_ROWS))
