"""Conditions of encoding rows: the statistics of their inputs, factored, and the correction for drift.

Held-out chunks show whether a tensor has become better on text that it was not encoded under. A text of one
chunk leaves none, and those of nonsense are more of the same. Then drift is not corrected: unchecked, the
correction would fit the noise of the text.

Drift is how far inputs have moved away from the original's. The original computes W t and the model V x,
where x has moved away from t. The V that makes the sum of |W t - V x|^2 least is W + W D H^-1, with H the sum
of x x^T and D the sum of (t - x) x^T. Where little text was seen, V must stay near W, so the sum of
d |W - V|^2 is added:

    V = W + W T,   T = D (H + d I)^-1

Rounding then aims at V instead of W. T itself is never computed: rows are multiplied by D and by the root of
the inverse, twice. Of a matrix of few rows, the sum of W (t - x) x^T is taken, which is W D.

T has an unknown for each pair of columns, and must hold on other texts, too. So d is larger than what H is
damped by where weights are rounded under it. That is done under lifted moments, a guess at those of other
texts.

Directions with much energy in one text have less in another, and those with little have more. Rounding
moves errors to where one text has least, so it has to know. Eigenvalues are moved towards each other: w, in
units of the mean diagonal, counts as

    w + LIFT w / (w + KNEE)

That is 5 times as much for the smallest ones, and hardly more for the largest. It takes no eigenvectors.
With m the mean diagonal of H, the lifted moments are

    H + LIFT m (I - KNEE (H / m + KNEE I)^-1)

`Trust` and `Damping` say how far the sums over a text are trusted, and how much they are damped for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Self, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from gguf_tools.errors import BadActivation, BadMoments
from imatrix.calibrate.statistics.inputs import Held, Statistics
from imatrix.forward.device import to_numpy, to_torch
from imatrix.forward.workers import Workers
from imatrix.texts.quality import TextQuality
from imatrix.texts.tokens import Text
from quantize.formats.base import Floats32
from quantize.rounding.factor import DAMP, AnyMoments, Each, Factor, damped_inverse, inverse_root
from quantize.rounding.two_sided import OUTPUT_DAMP

KNEE = 0.5
"""Of the mean diagonal. Where gates of SmolLM2-135M are rounded under moments with 0.3 to 1 (and 1 to 4 for
LIFT), their error on other texts is the same within 1 %, and 2 to 4 % smaller than under H itself."""

LIFT = 2.0
"""See KNEE."""


def lifted(moments: AnyMoments, n_real: int | None = None, each: Each = map) -> Floats32:
    """Return lifted moments, float32 (n, n).

    moments  floats (n, n)
    n_real   columns without padding, which is behind them and stays as it is; None: all
    each     see `Factor.of`
    raises   BadMoments, see `Factor.of`
    """
    real = moments[:n_real, :n_real]
    made, mean = damped_inverse(real, KNEE, each)
    made *= np.float32(-KNEE * LIFT * mean)
    made.reshape(-1)[:: len(made) + 1] += np.float32(LIFT * mean)
    made += real
    n_zeros = len(moments) - len(made)
    return np.pad(made, (0, n_zeros)) if n_zeros else made


@dataclass(frozen=True, eq=False)
class Correction:
    """The step T that makes up for drift, as three factors: T = D / m U^T U.

    drift  D, float32 (n_cols, n_cols); or W D, float32 (n_rows, n_cols), where `is_through`
    upper  U with (H / m + d I)^-1 = U^T U, float32 (n_real, n_real): columns behind are padding, and not
           changed
    mean   m, the mean diagonal of H
    """

    drift: Floats32
    upper: Floats32
    mean: float
    is_through: bool

    @classmethod
    def of(
        cls, statistics: Statistics, damp: float, n_real: int | None = None, each: Each = map
    ) -> Self | None:
        """Make the correction; None where the inputs are the original's.

        each    see `Factor.of`
        raises  BadMoments, see `Factor.of`
        """
        if statistics.drift is None:
            return None
        root = inverse_root(statistics.own[:n_real, :n_real], damp, each)
        return cls(statistics.drift, *root, statistics.is_through)

    def step(self, rows: torch.Tensor, first: int = 0) -> torch.Tensor:
        """Compute W T of some rows, float32 (n_rows, n_cols); `first` is the number of the first."""
        upper, n_cols = to_torch(self.upper), rows.shape[1]
        n_real = len(upper)
        if self.is_through:
            moved = to_torch(self.drift[first : first + len(rows), :n_real])
        else:
            moved = rows[:, :n_real] @ to_torch(self.drift[:n_real, :n_real])
        made = moved / self.mean @ upper.T @ upper
        return torch.nn.functional.pad(made, (0, n_cols - n_real))


def corrected(rows: Floats32, correction: Correction, held: Held | None = None, first: int = 0) -> Floats32:
    """Return W + a W T of some rows, float32 (n_rows, n_cols); `first` is the number of the first.

    held  held-out rows: a, from 0 to 1, is what makes up best for the drift of those that count. Where
          little text was seen, T is mostly noise, and a is small. None: a is 1
    """
    weights = to_torch(rows)
    product = correction.step(weights, first)
    if held is not None:
        x, roots = held.x, held.places.shares.sqrt()[:, None]
        moved = (held.originals - x) @ weights.T * roots
        made_up = x @ product.T * roots
        total = float(made_up.double().square().sum())
        share = float((moved.double() * made_up).sum()) / total if total else 0.0
        product *= min(1.0, max(0.0, share))
    aimed: Floats32 = to_numpy(weights + product)
    return aimed


@dataclass(frozen=True)
class Conditions:
    """The conditions of some rows.

    importances  of the columns, see `Statistics.importances`; None where nothing was seen
    n_seen       rows of their own inputs that were seen
    factor       of the second moments; None where these can't be used
    correction   the step T: rounding aims at W + a W T. None: no correction
    held         held-out rows, on which encodings are compared; None: there are none
    """

    importances: Floats32 | None
    n_seen: int
    factor: Factor | None
    correction: Correction | None
    held: Held | None

    @classmethod
    def nothing(cls) -> Self:
        """Return empty conditions, for rows whose inputs were never observed."""
        return cls(None, 0, None, None, None)

    def aim(self, rows: Floats32, first: int) -> Floats32:
        """Return the aim of rounding: rows from `first` on with the correction, float32 (n_rows, n_cols)."""
        return rows if self.correction is None else corrected(rows, self.correction, self.held, first)


def conditions_of(
    inputs: Collection[tuple[Statistics, Held | None]],
    name: str,
    workers: Workers,
    trust: Trust,
    n_real: int | None = None,
) -> Iterator[Conditions]:
    """Yield the conditions that follow from statistics, each with its held-out rows.

    name    of a matrix, for messages
    n_real  its columns without padding; None: all
    raises  BadActivation for NaN or infinity in the matrix's input
    """

    def make(each: tuple[Statistics, Held | None], do: Each = map) -> Conditions:
        statistics, held = each
        if not statistics.is_finite:
            raise BadActivation(f"{name}: its input has NaN or infinity")
        n_rows, n_cols = statistics.n_rows, n_real or len(statistics.own)
        damp, drift_damp = trust.input_damp(n_rows, n_cols), trust.drift_damp(n_rows, n_cols)

        def factored() -> Factor:
            return Factor.of(lifted(statistics.own, n_real, do), damp, n_real, overwrite=True, each=do)

        factor, correction = _if_usable(statistics, factored), None
        if factor is not None:
            correction = _if_usable(statistics, lambda: Correction.of(statistics, drift_damp, n_real, do))
        importances = statistics.importances() if n_rows else None
        return Conditions(importances, statistics.n_seen, factor, correction, held)

    if len(inputs) < workers.n_threads:  # threads share each matrix
        yield from (make(each, workers.each) for each in inputs)
    else:
        yield from workers.each(make, inputs)


_Made = TypeVar("_Made")


def _if_usable(statistics: Statistics, make: Callable[[], _Made]) -> _Made | None:
    """Make a value of second moments; None where nothing was seen, or they can't be used."""
    if not statistics.n_rows:
        return None
    try:
        return make()
    except BadMoments:
        return None


@dataclass(frozen=True)
class Damping:
    """How much moments are damped: what is added to their diagonal, in units of its mean.

    It is as if some tokens more had been seen, whose columns have nothing to do with each other. The fewer
    have been seen, the more these count.

    prior  how many, for each column
    least  damping with any number of tokens
    most   damping with next to none
    """

    prior: float
    least: float
    most: float

    def of(self, n_tokens: float, n_cols: int) -> float:
        """Choose the damping of the moments of `n_cols` columns that `n_tokens` tokens were summed to."""
        return min(max(self.prior * n_cols / max(n_tokens, 1), self.least), self.most)


INPUT_DAMPING = Damping(prior=0.6, least=DAMP, most=0.1)
"""Of the moments of inputs. The bounds were measured with many tokens and with few, on two small models. The
prior is from 12 layers of SmolLM2-135M at Q2_K under 14336 tokens, 9 to 19 for each column. On four other
kinds of text, inputs damped by 0.03 left 3 % less divergence than by 0.01."""

DRIFT_DAMPING = Damping(prior=5, least=DAMP, most=1.0)
"""Of the moments of inputs, where a matrix is to make up for drift."""

_MOST_OUTPUT_DAMP = 10.0
"""Damping of a covariance of gradients that is all noise: rows hardly make up for each other any more."""

_ALIKE = 2
"""Tokens of a chunk are alike, so a sum over them is noisier than one over as many that have nothing to do
with each other. With 2, matrices of SmolLM2-135M rounded to Q2_K do least damage on other texts."""

_UNPROVEN_OUTPUT_DAMP = 0.5
"""The least damping of such a covariance where held-out chunks prove nothing."""


def noise_damp(covariance: npt.NDArray[np.float64], fourth: float, n_tokens: float) -> float:
    """Compute how much damping makes a covariance the best guess at that of all text.

    It is the shrinkage of Ledoit and Wolf (Journal of Multivariate Analysis 88, 2004) towards a multiple of
    the identity: by the share of the squared distance from there that is noise. Gradients have heavy tails. A
    few tokens make up most of the sum in some matrices, which only the fourth moments tell.

    covariance  a sum of g g^T over tokens, float64 (n, n); outputs that never had a gradient do not count
    fourth      the sum of |g|^4
    n_tokens    that were summed; 0 for an expert that no token has chosen
    returns     what to add to the diagonal, in units of its mean
    """
    if not n_tokens:
        return math.inf
    squares = float(np.square(covariance).sum()) / n_tokens**2
    diagonal = np.diagonal(covariance) / n_tokens
    distance = squares - float(diagonal.sum()) ** 2 / max(1, int(np.count_nonzero(diagonal)))
    noise = _ALIKE * (fourth / n_tokens - squares) / n_tokens
    return float(max(0.0, noise) / (distance - noise)) if distance > noise else math.inf


@dataclass(frozen=True)
class Trust:
    """How far moments are trusted.

    is_proven  whether held-out chunks show if a tensor has become better. Without them, it is not corrected
               for what the ones before it have changed, and moments are damped as if next to nothing had been
               seen
    """

    is_proven: bool = True

    @classmethod
    def of(cls, text: Text, quality: TextQuality) -> Trust:
        """Decide how far a text is trusted."""
        return cls(text.n_chunks > 1 and not quality.is_nonsense)

    def input_damp(self, n_tokens: float, n_cols: int) -> float:
        """Choose the damping of second moments of inputs."""
        return INPUT_DAMPING.of(n_tokens, n_cols) if self.is_proven else INPUT_DAMPING.most

    def drift_damp(self, n_tokens: float, n_cols: int) -> float:
        """Choose the damping of the step that makes up for drift."""
        return DRIFT_DAMPING.of(n_tokens, n_cols)

    def output_damp(self, covariance: npt.NDArray[np.float64], fourth: float, n_tokens: float) -> float:
        """Choose the damping of a covariance of gradients, see `noise_damp`."""
        least = OUTPUT_DAMP if self.is_proven else _UNPROVEN_OUTPUT_DAMP
        return min(max(noise_damp(covariance, fourth, n_tokens), least), _MOST_OUTPUT_DAMP)
