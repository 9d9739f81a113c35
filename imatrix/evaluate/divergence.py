"""How far two models' predictions are apart, measured and named as llama-perplexity does.

Everything here is a function of per-token values. Of one token count the log probability that each model
gives the token that follows, the divergence of the two distributions, KL(base || model), and each model's
most likely token. Errors are standard errors of the mean; a percentile between two tokens is interpolated
linearly.

llama-perplexity has no flips: tokens that the base is confident about and that the model would not choose.
They are what a reader notices.

A model's MTP layer drafts: at a position, the draft predicts the same token as the model, from a hidden state
less; see imatrix/forward/mtp.py. It is accepted if its most likely token is the model's own. So does
llama.cpp's speculative decoding accept the first draft of each step when it decodes greedily. The figure is
about a given text: while a model writes its own, shares are higher.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Values = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

KLD_PERCENTILES: Mapping[str, float] = {
    "min": 0, "p0_1": 0.1, "p1": 1, "p5": 5, "p10": 10, "median": 50, "p90": 90, "p95": 95, "p99": 99,
    "p99_9": 99.9, "max": 100,
}  # fmt: skip
"""Percentiles of the divergence, by their names in JSON."""

DELTA_PERCENTILES: Mapping[str, float] = {
    "min": 0, "p0_1": 0.1, "p1": 1, "p5": 5, "p10": 10, "p25": 25, "median": 50, "p75": 75, "p90": 90,
    "p95": 95, "p99": 99, "p99_9": 99.9, "max": 100,
}  # fmt: skip
"""Percentiles of the change of a probability, by their names in JSON."""

_LARGEST_LOSS = 700.0
"""Mean loss a little below what exp() can take."""


@dataclass(frozen=True)
class Estimate:
    """A number with its standard error, which is NaN where there are too few tokens for one."""

    value: float
    error: float

    def text(self, digits: int) -> str:
        """Show both with so many decimals."""
        return f"{self.value:.{digits}f} +/- {self.error:.{digits}f}"


CONFIDENT = 0.9
"""Probability of its most likely token above which the base is confident."""


@dataclass(frozen=True, eq=False)
class TokenValues:
    """Values of each prediction that is measured; all arrays are (n_measured,).

    chunk                    number of the chunk
    position                 place in the chunk of the token after which the prediction is made, from 0
    base_log_prob, log_prob  log probability of the token that follows, by the base and by the model
    kld                      divergence KL(base || model), in nats
    base_top, top            the most likely token, by the base and by the model
    base_top_p               probability that the base gives to its own most likely token
    """

    chunk: Ints
    position: Ints
    base_log_prob: Values
    log_prob: Values
    kld: Values
    base_top: Ints
    top: Ints
    base_top_p: Values

    def some(self, chosen: npt.NDArray[np.bool_]) -> TokenValues:
        """Return those that are chosen."""
        return TokenValues(**{name: values[chosen] for name, values in vars(self).items()})

    def of_chunks(self, chunks: range) -> TokenValues:
        """Return those of some chunks that follow each other, which are numbered from 0 again."""
        found = self.some((self.chunk >= chunks.start) & (self.chunk < chunks.stop))
        return replace(found, chunk=found.chunk - chunks.start)

    @property
    def same_top(self) -> npt.NDArray[np.bool_]:
        """Whether both models have the same most likely token."""
        return self.top == self.base_top

    @property
    def confident(self) -> npt.NDArray[np.bool_]:
        """Whether the base gives its most likely token more than CONFIDENT."""
        return self.base_top_p > CONFIDENT

    @property
    def flipped(self) -> npt.NDArray[np.bool_]:
        """Whether the base is confident, and the model has another most likely token."""
        return self.confident & ~self.same_top

    @property
    def delta_p(self) -> Values:
        """By how much the model changes the probability of the token that follows."""
        return np.exp(self.log_prob) - np.exp(self.base_log_prob)


@dataclass(frozen=True)
class Spread:
    """A mean over tokens, and percentiles by name."""

    mean: Estimate
    percentiles: Mapping[str, float]


@dataclass(frozen=True)
class PositionBucket:
    """The mean divergence of some positions of all chunks, `first` to `last` inclusive."""

    first: int
    last: int
    kld: Estimate


@dataclass(frozen=True)
class Divergence:
    """How far a model is from its base.

    ln_ratio       logarithm of the ratio of the perplexities, model to base
    correlation    of the losses of both models; NaN where one has no variance
    rms_delta_p    root of the mean square of the change of the right token's probability
    same_top       share of tokens, 0 to 1, where both models have the same most likely token
    flips          share of tokens, 0 to 1, that the base is confident about and where the model has another
                   most likely token
    flips_of_confident  the same tokens, as a share of those that the base is confident about
    by_position    the divergence at the beginning of the measured positions, and further on
    """

    ppl: Estimate
    base_ppl: Estimate
    ln_ratio: Estimate
    ratio: Estimate
    difference: Estimate
    correlation: float
    kld: Spread
    delta_p: Spread
    rms_delta_p: Estimate
    same_top: Estimate
    flips: Estimate
    flips_of_confident: Estimate
    by_position: tuple[PositionBucket, ...]


def measure(tokens: TokenValues, n_buckets: int = 4) -> Divergence:
    """Compute all measures of the tokens.

    n_buckets  into so many groups positions are divided
    """
    loss, base_loss = -tokens.log_prob, -tokens.base_log_prob
    mean, base_mean = mean_of(loss), mean_of(base_loss)
    ppl, base_ppl = perplexity(loss), perplexity(base_loss)
    covariance, errors = _covariance_of_means(loss, base_loss), mean.error * base_mean.error
    ln_ratio = Estimate(
        mean.value - base_mean.value, _error_of_difference(mean.error, base_mean.error, covariance)
    )
    ratio = exp_loss(ln_ratio.value)
    delta_p = tokens.delta_p
    squares = mean_of(delta_p**2)
    rms = math.sqrt(squares.value)
    return Divergence(
        ppl=ppl,
        base_ppl=base_ppl,
        ln_ratio=ln_ratio,
        ratio=Estimate(ratio, ratio * ln_ratio.error),
        difference=Estimate(
            ppl.value - base_ppl.value,
            _error_of_difference(ppl.error, base_ppl.error, covariance * ppl.value * base_ppl.value),
        ),
        # Rounding must not take it beyond 1.
        correlation=max(-1.0, min(1.0, covariance / errors)) if errors else math.nan,
        kld=_spread(tokens.kld, KLD_PERCENTILES),
        delta_p=_spread(delta_p, DELTA_PERCENTILES),
        rms_delta_p=Estimate(rms, 0.5 * squares.error / rms if rms else 0.0),
        same_top=share_of(tokens.same_top),
        flips=share_of(tokens.flipped),
        flips_of_confident=share_of(tokens.flipped[tokens.confident]),
        by_position=_by_position(tokens, n_buckets),
    )


def mean_of(values: Values) -> Estimate:
    """Return the mean of values (n,) and its standard error."""
    if len(values) < 2:
        return Estimate(float(values.mean()) if len(values) else math.nan, math.nan)
    return Estimate(float(values.mean()), float(values.std()) / math.sqrt(len(values) - 1))


def mean_over_chunks(values: Values, chunk: Ints) -> Estimate:
    """Return the mean of values (n,) and its standard error over chunks; NaN where there is one chunk.

    Tokens of a chunk are alike, so the error is larger than `mean_of` tells. It is that of a ratio of sums
    over a sample of chunks (Cochran, Sampling Techniques, 3rd edition, section 6.3).

    chunk  number of the chunk of each value
    """
    _, places, counts = np.unique(chunk, return_inverse=True, return_counts=True)
    n_chunks, mean = len(counts), float(values.mean()) if len(values) else math.nan
    if n_chunks < 2:
        return Estimate(mean, math.nan)
    residuals = np.bincount(places, values) - mean * counts
    variance = n_chunks / (n_chunks - 1) * float(np.square(residuals).sum())
    return Estimate(mean, math.sqrt(variance) / len(values))


def perplexity(losses: Values) -> Estimate:
    """Return the perplexity for negative log probabilities (n,)."""
    mean = mean_of(losses)
    value = exp_loss(mean.value)
    return Estimate(value, value * mean.error)


def _spread(values: Values, percentiles: Mapping[str, float]) -> Spread:
    found: Sequence[float] = np.percentile(values, list(percentiles.values())).tolist()
    return Spread(mean_of(values), dict(zip(percentiles, found, strict=True)))


def share_of(hits: npt.NDArray[np.bool_]) -> Estimate:
    """Return the share of hits, (n,), and its standard error."""
    share = float(hits.mean()) if hits.size else math.nan
    return Estimate(share, math.sqrt(share * (1 - share) / (hits.size - 1)) if hits.size > 1 else math.nan)


def _by_position(tokens: TokenValues, n_buckets: int) -> tuple[PositionBucket, ...]:
    positions = np.unique(tokens.position)
    groups = np.array_split(positions, min(n_buckets, len(positions)))
    return tuple(
        PositionBucket(int(group[0]), int(group[-1]), mean_of(tokens.kld[np.isin(tokens.position, group)]))
        for group in groups
    )


def _covariance_of_means(a: Values, b: Values) -> float:
    if len(a) < 2:
        return math.nan
    return float(((a - a.mean()) * (b - b.mean())).mean()) / (len(a) - 1)


def _error_of_difference(a: float, b: float, covariance: float) -> float:
    """Return the error of the difference of two means; rounding must not take it below zero."""
    variance = a * a + b * b - 2 * covariance
    return math.nan if math.isnan(variance) else math.sqrt(max(0.0, variance))


def exp_loss(mean_loss: float) -> float:
    """Return the perplexity for a mean negative log probability; infinity where it is too large."""
    return math.exp(mean_loss) if not mean_loss > _LARGEST_LOSS else math.inf


@dataclass(frozen=True)
class Drafts:
    """The drafts of a model, against those of its base.

    kld            divergence KL(the base's draft || the model's) of the token after the next
    same_top       share of positions, 0 to 1, where both drafts have the same most likely token
    accepted       share of positions where the model's draft is the model's own most likely token
    base_accepted  the same of the base
    """

    kld: Spread
    same_top: Estimate
    accepted: Estimate
    base_accepted: Estimate

    @classmethod
    def of(cls, tokens: TokenValues, drafts: TokenValues) -> Drafts:
        """Compare drafts with the predictions at the same positions, `tokens`."""
        found = measure(drafts)
        return cls(
            kld=found.kld,
            same_top=found.same_top,
            accepted=share_of(drafts.top == tokens.top),
            base_accepted=share_of(drafts.base_top == tokens.base_top),
        )

    def to_json(self) -> dict[str, Any]:
        """Return as JSON data what was measured: ratios as fractions."""
        shares = {
            "same_top": self.same_top,
            "accepted": self.accepted,
            "base_accepted": self.base_accepted,
        }
        kld = {"mean": self.kld.mean.value, "error": self.kld.mean.error, **self.kld.percentiles}
        values = {name: share.value for name, share in shares.items()}
        return {"kld": kld, **values, **{f"{name}_error": share.error for name, share in shares.items()}}


DRAFTS_ARE = "drafts of the MTP layer, one token further; accepted if the model itself would choose it"
"""Heading of a table of drafts."""

DRAFT_HEADINGS = ("model", "KLD", "median", "99%", "same draft", "accepted", "base's")


def draft_rows(models: Iterable[tuple[Path, Drafts | None]]) -> Iterator[tuple[str, ...]]:
    """Yield a row under DRAFT_HEADINGS for each file that drafts."""
    for path, found in models:
        if found is not None:
            yield (
                path.name,
                found.kld.mean.text(6),
                *(f"{found.kld.percentiles[name]:.5f}" for name in ("median", "p99")),
                *(f"{share.value:.2%}" for share in (found.same_top, found.accepted, found.base_accepted)),
            )
