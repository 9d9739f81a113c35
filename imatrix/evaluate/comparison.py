"""Two files compared on the same chunks: which one is nearer to the base, and how sure that is.

Both files have read the same chunks. What makes a chunk hard for one makes it hard for the other, so their
difference is far better known than either figure. Chunks are independent of each other, and the tokens of a
chunk are not. So all that is used of a chunk is the sum over its tokens.

Mean divergences are compared by the logarithm of their ratio. Divergence has a heavy tail, a few tokens may
make half of a mean, and a class of texts may have eight chunks. An ordinary interval then holds the truth
less often than it says, because its centre and its width err together. So the interval is

    value +- t(0.975, degrees) x error x (1 + (z^4 + 2 z^2 - 3) / 18 x skewness^2),    z = 1.96

error     the jackknife's over chunks: it leaves out one after the other
degrees   chunks - 1; of several classes together, Welch's and Satterthwaite's. A class with a single chunk
          is taken to add as much error as the others do on average
skewness  of the estimate, from what each chunk adds. The factor is the term of skewness in the expansion of
          Student's t (P. Hall, The Bootstrap and Edgeworth Expansion, 1992, section 2.6)

A file that is far nearer to the base than the other may owe its own sum to one chunk. Then its logarithm is
uncertain, and the difference of the two is not. So a verdict takes the probability of the difference,
doubled, where that is less. If there is no difference, that adds less than 0.3 % to the chance of a verdict.

`scripts/check/intervals.py` counts how often intervals hold the truth, beside methods that were not chosen.

Among eight classes some 95 % interval leaves out the truth in one case of three. So intervals and verdicts
by class are corrected for the number of classes (C. Bonferroni): each interval has the level 1 - 0.05 /
classes, and all of them hold the truth in 95 % of cases. If no class differs, the chance of any verdict is
5 %. What is said over all classes is a single interval and a single verdict, and is not corrected.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from imatrix.evaluate.divergence import Ints, TokenValues, Values

LEVEL = 0.95
"""Share of intervals that hold the truth; of those by class, share of cases in which all of them do."""

_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(128)
_FARTHEST, _HALVINGS = 12.0, 60
"""The mass beyond so many standard deviations, e^-72 of it, is nothing; how often an interval is halved."""

_Z = 1.959964
_SKEWNESS = (_Z**4 + 2 * _Z**2 - 3) / 18


class Verdict(Enum):
    """Verdict on a file that is compared with another one."""

    BETTER = "better"
    WORSE = "worse"
    NO_DIFFERENCE = "no significant difference"


@dataclass(frozen=True)
class Interval:
    """A figure with its interval, whose ends are NaN where no class has more than one chunk.

    p  probability of a figure at least as far from that of two equal files, if there is no difference
    """

    value: float
    low: float
    high: float
    p: float


@dataclass(frozen=True)
class Comparison:
    """One file against another, on a class of texts or on all classes.

    name            of the class; None for all of them, which weigh the same
    kld_ratio       mean divergence of this file over that of the other
    kld_difference  mean divergence of this file less that of the other, in nats
    same_top        share of tokens with the base's most likely token, this file's less the other's
    flips           share of tokens that the base is confident about and the file would not choose, likewise
    p               that of the divergence, corrected for the number of classes
    level           share of each of its intervals that hold the truth, corrected likewise
    floor           divergence below which a difference is noise; None: not measured
    """

    name: str | None
    n_chunks: int
    kld_ratio: Interval
    kld_difference: Interval
    same_top: Interval
    flips: Interval
    p: float
    level: float = LEVEL
    floor: float | None = None

    @property
    def verdict(self) -> Verdict:
        """Verdict on this file's mean divergence."""
        if not self.p < 1 - LEVEL:
            return Verdict.NO_DIFFERENCE
        return Verdict.BETTER if self.kld_difference.value < 0 else Verdict.WORSE

    @property
    def is_below_floor(self) -> bool:
        """Whether the divergences differ by less than the noise floor."""
        return self.floor is not None and abs(self.kld_difference.value) < self.floor

    @property
    def words(self) -> str:
        """The verdict in words."""
        if self.verdict is Verdict.NO_DIFFERENCE or not self.is_below_floor:
            return self.verdict.value
        return f"{self.verdict.value}, by less than the noise floor"


@dataclass(frozen=True)
class Comparisons:
    """One file against another, by class and on all classes together."""

    by_class: tuple[Comparison, ...]
    overall: Comparison


@dataclass(frozen=True, eq=False)
class ChunkSums:
    """Values of two files, summed over the tokens of each chunk; all arrays are float64 (n_chunks,).

    a, b   sums of the values of this file and of the other
    count  number of the chunk's tokens
    """

    a: Values
    b: Values
    count: Values

    @classmethod
    def of(cls, chunk: Ints, a: npt.ArrayLike, b: npt.ArrayLike) -> ChunkSums:
        """Sum values of tokens, (n_tokens,) each; `chunk` is the number of each token's chunk."""
        _, place = np.unique(chunk, return_inverse=True)

        def summed(values: npt.ArrayLike) -> Values:
            return np.bincount(place, np.asarray(values, np.float64)).astype(np.float64)

        return cls(summed(a), summed(b), summed(np.ones(len(place))))


def compare(
    pairs: Mapping[str, tuple[TokenValues, TokenValues]], floors: Mapping[str, float] | None = None
) -> Comparisons:
    """Compare a file with another one.

    pairs   class -> what was measured of both on the same tokens, this file's first
    floors  class -> the noise floor of its mean divergence, in nats; None: not measured
    """
    sums = {name: _Sums.of(*pair) for name, pair in pairs.items()}
    by_class = (
        _compared(name, [each], None if floors is None else floors[name], n_looks=len(sums))
        for name, each in sums.items()
    )
    floor = None if floors is None else float(np.mean([floors[name] for name in pairs]))
    return Comparisons(tuple(by_class), _compared(None, [*sums.values()], floor))


@dataclass(frozen=True, eq=False)
class _Sums:
    """Sums of the figures in which two files are compared on a class."""

    kld: ChunkSums
    same_top: ChunkSums
    flips: ChunkSums

    @classmethod
    def of(cls, a: TokenValues, b: TokenValues) -> _Sums:
        return cls(
            ChunkSums.of(a.chunk, a.kld, b.kld),
            ChunkSums.of(a.chunk, a.same_top, b.same_top),
            ChunkSums.of(a.chunk, a.flipped, b.flipped),
        )


def _compared(
    name: str | None, classes: Sequence[_Sums], floor: float | None, n_looks: int = 1
) -> Comparison:
    """Compare two files on some classes, corrected for so many comparisons at once."""
    kld, level = [each.kld for each in classes], 1 - (1 - LEVEL) / n_looks
    return Comparison(
        name=name,
        n_chunks=sum(len(each.count) for each in kld),
        kld_ratio=ratio_interval(kld, level),
        kld_difference=difference_interval(kld, level),
        same_top=difference_interval([each.same_top for each in classes], level),
        flips=difference_interval([each.flips for each in classes], level),
        p=min(1.0, n_looks * verdict_p(kld)),
        level=level,
        floor=floor,
    )


def verdict_p(classes: Sequence[ChunkSums]) -> float:
    """Compute the probability of means at least as far apart, if there is no difference."""
    return min(ratio_interval(classes).p, 2 * difference_interval(classes).p)


def ratio_interval(classes: Sequence[ChunkSums], level: float = LEVEL) -> Interval:
    """Compute the ratio of both files' means with its interval; classes weigh the same.

    The ends are NaN where the ratio is 0, infinite or undefined: a file that equals the base has no error.
    """
    return _from_log(_interval(classes, _log_ratio, level))


def difference_interval(classes: Sequence[ChunkSums], level: float = LEVEL) -> Interval:
    """Compute the difference of both files' means with its interval; classes weigh the same."""
    return _interval(classes, np.subtract, level)


def mean_interval(classes: Sequence[tuple[Ints, Values]]) -> Interval:
    """Compute the mean of values with its interval; classes weigh the same.

    classes  of each the number of every value's chunk, and the values
    """
    return _interval([ChunkSums.of(chunk, each, each) for chunk, each in classes], lambda a, _: a)


def kld_interval(classes: Sequence[TokenValues]) -> Interval:
    """Compute the mean divergence of a file with its interval; classes weigh the same."""
    sums = [ChunkSums.of(each.chunk, each.kld, each.kld) for each in classes]
    return _from_log(_interval(sums, lambda a, _: _log_ratio(a, 1.0)))


def flips_interval(classes: Sequence[TokenValues]) -> Interval:
    """Compute the share of tokens that a file flips with its interval; classes weigh the same."""
    found = mean_interval([(each.chunk, each.flipped.astype(np.float64)) for each in classes])
    return replace(found, low=max(0.0, found.low))


_Statistic = Callable[[Any, Any], Any]
"""Of the mean of this file and that of the other; takes arrays, too."""


def _log_ratio(a: Any, b: Any) -> Any:
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.log(a) - np.log(b)


def _from_log(found: Interval) -> Interval:
    value, low, high = (float(np.exp(end)) for end in (found.value, found.low, found.high))
    return Interval(value, low, high, found.p)


def _interval(classes: Sequence[ChunkSums], statistic: _Statistic, level: float = LEVEL) -> Interval:
    means = _means(classes)
    value = float(statistic(*means))
    known = [each for each in classes if len(each.count) > 1]
    if not known or not math.isfinite(value):
        return Interval(value, math.nan, math.nan, 1.0)
    added = [_added(each, means, len(classes), statistic) for each in known]
    variances = [float((each**2).sum()) * len(each) / (len(each) - 1) for each in added]
    variance = sum(variances)
    if not math.isfinite(variance):
        return Interval(value, math.nan, math.nan, 1.0)
    if not variance:
        return Interval(value, value, value, 0.0 if value else 1.0)
    joined = np.concatenate(added)
    skewness = float((joined**3).sum()) / float((joined**2).sum()) ** 1.5
    degrees = variance**2 / sum(own**2 / (len(each) - 1) for own, each in zip(variances, added, strict=True))
    error = math.sqrt(variance * len(classes) / len(added)) * (1 + _SKEWNESS * skewness**2)
    half = two_sided_quantile(1 - level, degrees) * error
    return Interval(value, value - half, value + half, two_sided_p(value / error, degrees))


def _means(classes: Sequence[ChunkSums]) -> tuple[float, float]:
    """Return the mean of each file; classes weigh the same."""
    means = [(each.a.sum() / each.count.sum(), each.b.sum() / each.count.sum()) for each in classes]
    a, b = np.mean(means, 0)
    return float(a), float(b)


def _added(sums: ChunkSums, means: tuple[float, float], n_classes: int, statistic: _Statistic) -> Values:
    """Return by how much each chunk of a class moves the statistic of `means`, found by leaving it out.

    The sum of squares, times n / (n - 1), is the jackknife's variance.
    """
    n_chunks, count = len(sums.count), sums.count.sum()
    moved = [
        mean + ((each.sum() - each) / (count - sums.count) - each.sum() / count) / n_classes
        for mean, each in zip(means, (sums.a, sums.b), strict=True)
    ]
    without: Values = statistic(*moved)
    return (without.mean() - without) * (n_chunks - 1) / n_chunks


def two_sided_p(t: float, degrees: float) -> float:
    """Compute the probability of a value farther from 0 than `t`, for 1 degree of freedom or more.

    With t = sqrt(n) tan(x), the density of Student's t for n degrees of freedom is proportional to
    cos(x)^(n - 1), for x from -pi/2 to pi/2. So the mass beyond t is the integral of a smooth function over a
    short interval, and a fixed Gauss-Legendre rule gives it to about 1e-12; to 1e-6 between one and two
    degrees.
    """
    return _mass(math.atan(abs(t) / math.sqrt(degrees)), degrees) / _mass(0.0, degrees)


@lru_cache(maxsize=256)
def two_sided_quantile(p: float, degrees: float) -> float:
    """Compute the t that a value exceeds on either side with probability `p` in all."""
    below, above, wanted = 0.0, math.pi / 2, p * _mass(0.0, degrees)
    for _ in range(_HALVINGS):
        middle = (below + above) / 2
        if _mass(middle, degrees) > wanted:
            below = middle
        else:
            above = middle
    return math.sqrt(degrees) * math.tan(below)


def _mass(start: float, degrees: float) -> float:
    """Integrate cos(x)^(degrees - 1) from `start` to where nothing is left."""
    stop = min(math.pi / 2, _FARTHEST / math.sqrt(degrees))
    if start >= stop:
        return 0.0
    half = (stop - start) / 2
    return float(half * (_WEIGHTS * np.cos(start + half * (1 + _NODES)) ** (degrees - 1)).sum())
