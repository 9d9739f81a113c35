"""The texts where a file is worst: runs of tokens with the largest mean divergence."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from quality.divergence import TokenValues
from quality.evaluation import EvaluatedText
from quality.spelling import texts

N_TOKENS = 40
"""Number of tokens in a passage."""

N_BEFORE = 24
"""Number of tokens that are shown before a passage, as context."""


@dataclass(frozen=True)
class ColouredToken:
    """A token with how far the model's prediction of it is from the base's.

    kld          of the prediction, in nats
    base_p, p    probability that base and model gave the token
    """

    text: str
    kld: float
    base_p: float
    p: float


@dataclass(frozen=True)
class Passage:
    """A run of tokens.

    chunk     its number
    position  of the first token within the chunk
    kld       mean over the tokens
    before    the text that precedes it
    """

    chunk: int
    position: int
    kld: float
    before: str
    tokens: tuple[ColouredToken, ...]


def worst_passages(text: EvaluatedText, values: TokenValues, count: int) -> tuple[Passage, ...]:
    """Return `count` passages that don't overlap, the worst first; fewer if there are no more tokens."""
    length = min(N_TOKENS, values.kld.shape[1])
    sums = np.cumsum(np.pad(values.kld, ((0, 0), (1, 0))), axis=1)
    means = (sums[:, length:] - sums[:, :-length]) / length
    passages: list[Passage] = []
    while len(passages) < count and np.isfinite(means).any():
        chunk, start = (int(number) for number in np.unravel_index(np.argmax(means), means.shape))
        passages.append(_passage(text, values, chunk, start, length))
        means[chunk, max(0, start - length + 1) : start + length] = -np.inf
    return tuple(passages)


def _passage(text: EvaluatedText, values: TokenValues, chunk: int, start: int, length: int) -> Passage:
    """Return the passage whose predictions begin at the measured position `start`."""
    here = slice(start, start + length)
    position = text.first + 1 + start  # a prediction is about the token that follows
    first = max(0, position - N_BEFORE)
    numbers = text.tokens[chunk, first : position + length].tolist()
    shown = texts([text.spelled[number] for number in numbers])
    n_before = position - first
    tokens = zip(
        shown[n_before:],
        values.kld[chunk, here].tolist(),
        np.exp(values.base_log_prob[chunk, here]).tolist(),
        np.exp(values.log_prob[chunk, here]).tolist(),
        strict=True,
    )
    return Passage(
        chunk=chunk,
        position=position,
        kld=float(values.kld[chunk, here].mean()),
        before="".join(shown[:n_before]),
        tokens=tuple(ColouredToken(*token) for token in tokens),
    )
