"""How far two models' predictions are apart, measured and named as llama-perplexity does.

Everything here is a function of per-token values. Of one token count the log probability that each model
gives the token that follows, the divergence of the two distributions, KL(base || model), and each model's
most likely token. Errors are standard errors of the mean; a percentile between two tokens is interpolated
linearly.

llama-perplexity has no flips: tokens that the base is confident about and that the model would not choose.
They are what a reader notices.

A model's MTP layer drafts: at a position, the draft predicts the same token as the model, from a hidden
state less; see imatrix/forward/mtp.py. It is accepted if its most likely token is the model's own. So does
llama.cpp's speculative decoding accept the first draft of each step when it decodes greedily. The figure is
about a given text: while a model writes its own, shares are higher.

The visitor computes the values of tokens from slices of their logits, in one pass with running maxima. Let
m and n be the maxima of the logits a of the base and b of a model. Three sums over the vocabulary are
enough: A of e^(a-m), B of e^(b-n), and C of e^(a-m) (a - b). The divergence is C/A - ln A + ln B - m + n. A
slice with a larger maximum shrinks the sums so far. Sums are float64: the terms cancel where models agree.

A base from a file has log probabilities instead of logits, which are too high where they share the lowest
code. llama-perplexity leaves those out, and takes the others as they are: e^m (C + A (ln B + n)).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from gguf_tools.errors import BadActivation
from imatrix.forward.device import to_cpu, to_numpy, to_torch
from imatrix.forward.logits import Positions, predicted_positions
from imatrix.texts.chunks import Chunks

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


class DivergenceVisitor:
    """A LogitVisitor of a base, which comes first, and any number of models.

    paths   of all models, for messages
    report  called with the number of chunks that are done, and of all
    floor   of a base that has log probabilities: those not above it are left out; None: it has logits
    raises  BadActivation from `finish_chunk` for logits with NaN or infinity

    State of every model and measured token, each (n_models, n_measured):
    maxima, sums   running maximum m of the logits, and the sum of e^(logit - m)
    crosses        the sum of e^(base - m) (base - logit), with the base's m
    right          logit of the token that follows
    tops           the most likely token
    """

    def __init__(
        self,
        chunks: Chunks,
        paths: Sequence[Path],
        device: torch.device,
        report: Callable[[int, int], object],
        floor: float | None = None,
    ) -> None:
        self.positions: Positions = predicted_positions(chunks)
        self._chunks = chunks
        self._paths, self._report, self._floor = tuple(paths), report, floor
        self._targets = to_torch(chunks.tokens[chunks.scored], device)
        shape = len(paths), len(self._targets)

        def filled(value: float) -> torch.Tensor:
            return torch.full(shape, value, dtype=torch.float64, device=device)

        self._maxima, self._sums = filled(float("-inf")), filled(0)
        self._crosses, self._right = filled(0), filled(0)
        self._tops = torch.zeros(shape, dtype=torch.int64, device=device)

    def visit(self, at: slice, first: int, logits: Sequence[torch.Tensor]) -> None:
        targets = self._targets[at]
        n_tokens = logits[0].shape[1]
        here = (targets >= first) & (targets < first + n_tokens)
        columns = targets[here] - first
        base = logits[0].to(targets.device).double()
        base_weights = torch.empty(0)
        base_shrink = torch.empty(0)
        for model, own in enumerate(logits):
            values = base if model == 0 else own.to(targets.device).double()
            row = (model, at)
            self._right[row][here] = values[here, columns]
            top, where = values.max(-1)
            before = self._maxima[row].clone()
            self._tops[row] = torch.where(top > before, where + first, self._tops[row])
            maxima = torch.maximum(before, top)
            shrink = torch.exp(before - maxima)
            weights = torch.exp(values - maxima[:, None])
            if model == 0 and self._floor is not None:
                weights = torch.where(values > self._floor, weights, 0.0)
            self._maxima[row] = maxima
            self._sums[row] = self._sums[row] * shrink + weights.sum(-1)
            if model == 0:
                base_weights, base_shrink = weights, shrink
            else:
                cross = (base_weights * (base - values)).sum(-1)
                self._crosses[row] = self._crosses[row] * base_shrink + cross

    def finish_chunk(self, chunk: int) -> None:
        sums = self._sums[:, self.positions.place(chunk)]
        sound_ones = to_cpu(torch.isfinite(sums).all(-1)).tolist()
        for path, sound in zip(self._paths, sound_ones, strict=True):
            if not sound:
                raise BadActivation(f"{path}: the logits have NaN or infinity")
        self._report(chunk + 1, self.positions.n_chunks)

    def log_prob(self, model: int) -> np.ndarray:
        """Return the log probability of each measured token's successor, float64 (n_measured,)."""
        found = self._right[model]
        if model or self._floor is None:
            found = found - self._maxima[model] - self._sums[model].log()
        values: np.ndarray = to_numpy(found)
        return values

    def values(self, model: int) -> TokenValues:
        """Compute the values of each token for a model, counted from 1, against the base."""
        logs = self._sums.log()
        if self._floor is None:
            kld = self._crosses[model] / self._sums[0] - logs[0] + logs[model]
            kld = kld - self._maxima[0] + self._maxima[model]
        else:
            kld = self._crosses[model] + self._sums[0] * (logs[model] + self._maxima[model])
            kld = kld * torch.exp(self._maxima[0])
        tokens = to_numpy(self.positions.tokens)
        chunk = self._chunks.chunk_of(tokens)
        return TokenValues(
            chunk=chunk,
            position=tokens - self._chunks.bounds[chunk],
            base_log_prob=self.log_prob(0),
            log_prob=self.log_prob(model),
            kld=to_numpy(kld),
            base_top=to_numpy(self._tops[0]),
            top=to_numpy(self._tops[model]),
            base_top_p=to_numpy(1 / self._sums[0] if self._floor is None else torch.exp(self._maxima[0])),
        )
