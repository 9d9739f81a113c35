"""How far a file is from its base on the classes of a suite, and over all: each class weighs the same.

Errors are over chunks: tokens of one chunk are alike, and an error that takes them for independent ones is
too small. `evaluate` on one text gives llama-perplexity's errors, which do that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from imatrix.evaluate.divergence import Estimate, TokenValues, Values, exp_loss, mean_over_chunks

ALL = "all"
"""Name of the figures over all classes beside those of classes."""


@dataclass(frozen=True)
class Figures:
    """How far a file is from its base.

    ppl, base_ppl       perplexity of the file and of the base; over several classes their geometric mean
    ln_ratio            logarithm of the ratio of the two, file to base
    kld                 mean divergence in nats; median, p99 and p99_9 are its percentiles
    same_top            share of tokens, 0 to 1, where both have the same most likely token
    flips               share of tokens that the base is confident about, and where the file has another one
    flips_of_confident  the same, of the tokens that the base is confident about; NaN if there is none
    """

    ppl: float
    base_ppl: float
    ln_ratio: Estimate
    kld: Estimate
    median: float
    p99: float
    p99_9: float
    same_top: Estimate
    flips: Estimate
    flips_of_confident: Estimate

    @classmethod
    def over(cls, classes: Sequence[TokenValues]) -> Self:
        """Compute the figures of one class, or over several."""

        def mean(of: Callable[[TokenValues], Values]) -> Estimate:
            return _mean([mean_over_chunks(of(each), each.chunk) for each in classes])

        sure = [each.some(each.confident) for each in classes]
        median, p99, p99_9 = _percentiles([each.kld for each in classes], (0.5, 0.99, 0.999))
        return cls(
            ppl=exp_loss(mean(lambda tokens: -tokens.log_prob).value),
            base_ppl=exp_loss(mean(lambda tokens: -tokens.base_log_prob).value),
            ln_ratio=mean(lambda tokens: tokens.base_log_prob - tokens.log_prob),
            kld=mean(lambda tokens: tokens.kld),
            median=median,
            p99=p99,
            p99_9=p99_9,
            same_top=mean(lambda tokens: tokens.same_top.astype(np.float64)),
            flips=mean(lambda tokens: tokens.flipped.astype(np.float64)),
            flips_of_confident=_mean(
                [mean_over_chunks(each.flipped.astype(np.float64), each.chunk) for each in sure]
            ),
        )

    def row(self) -> dict[str, float]:
        """Return the figures by the names that they have in tables and in JSON."""
        return {
            "ppl": self.ppl,
            "base_ppl": self.base_ppl,
            **_named("ln_ppl_ratio", self.ln_ratio),
            **_named("kld", self.kld),
            "kld_median": self.median,
            "kld_p99": self.p99,
            "kld_p99_9": self.p99_9,
            **_named("same_top", self.same_top),
            **_named("flips", self.flips),
            **_named("flips_of_confident", self.flips_of_confident),
        }


def _named(name: str, estimate: Estimate) -> dict[str, float]:
    return {name: estimate.value, f"{name}_error": estimate.error}


def _mean(classes: Sequence[Estimate]) -> Estimate:
    """Return the mean of the classes that have a value.

    A class of one chunk has no error; it is taken to have the mean variance of the others.
    """
    known = [each for each in classes if not math.isnan(each.value)]
    variances = [each.error**2 for each in known if not math.isnan(each.error)]
    return Estimate(
        sum(each.value for each in known) / len(known) if known else math.nan,
        math.sqrt(sum(variances) / len(variances) / len(known)) if variances else math.nan,
    )


def _percentiles(classes: Sequence[Values], shares: Sequence[float]) -> list[float]:
    """Return percentiles, linear between values, where the values of each class weigh the same together."""
    values = np.concatenate(classes)
    weights = np.concatenate([np.full(len(each), 1 / len(each)) for each in classes])
    order = np.argsort(values)
    values, weights = values[order], weights[order]
    places = np.cumsum(weights) - weights
    found: list[float] = np.interp(shares, places / (places[-1] or 1), values).tolist()
    return found
