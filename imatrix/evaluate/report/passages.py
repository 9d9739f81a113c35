"""The texts where a file is worst: runs of tokens with the largest mean divergence."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from imatrix.evaluate.divergence import Ints, TokenValues
from imatrix.evaluate.evaluation import EvaluatedText
from imatrix.texts.spelling import texts

N_TOKENS = 40
"""Number of tokens in a passage."""

N_BEFORE = 24
"""Number of tokens that are shown before a passage, as context."""


@dataclass(frozen=True)
class ColouredToken:
    """A token with how far the model's prediction of it is from the base's.

    kld              of the prediction, in nats
    base_p, p        probability that base and model gave the token
    base_word, word  what base and model would have written here: their most likely tokens
    base_word_p      probability that the base gave its own
    """

    text: str
    kld: float
    base_p: float
    p: float
    base_word: str
    word: str
    base_word_p: float


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

    def changes(self, count: int) -> tuple[tuple[str, ColouredToken], ...]:
        """Return the tokens that the model would have written otherwise than the base, the farthest first.

        Each comes with the text of the passage up to it.
        """
        changed = [
            (self.before + "".join(token.text for token in self.tokens[:place]), token)
            for place, token in enumerate(self.tokens)
            if token.word != token.base_word
        ]
        return tuple(sorted(changed, key=lambda each: -each[1].kld)[:count])


def worst_passages(text: EvaluatedText, values: TokenValues, count: int) -> tuple[Passage, ...]:
    """Return `count` passages that don't overlap, the worst first; fewer if there are no more tokens."""
    length = min(N_TOKENS, _longest_run(values))
    sums = np.cumsum(np.pad(values.kld, (1, 0)))
    means = (sums[length:] - sums[:-length]) / length
    last = slice(length - 1, None)
    is_one_run = (values.chunk[last] == values.chunk[: len(means)]) & (
        values.position[last] - values.position[: len(means)] == length - 1
    )
    means[~is_one_run] = -np.inf
    passages: list[Passage] = []
    while len(passages) < count and np.isfinite(means).any():
        start = int(np.argmax(means))
        passages.append(_passage(text, values, slice(start, start + length)))
        means[max(0, start - length + 1) : start + length] = -np.inf
    return tuple(passages)


def _longest_run(values: TokenValues) -> int:
    """Count the measured tokens of the longest run without a gap."""
    ends = np.flatnonzero((np.diff(values.position) != 1) | (np.diff(values.chunk) != 0)) + 1
    return int(np.diff(ends, prepend=0, append=len(values.chunk)).max())


def _passage(text: EvaluatedText, values: TokenValues, here: slice) -> Passage:
    """Return the passage of some measured tokens of one chunk that follow each other."""
    chunk, position = int(values.chunk[here.start]), int(values.position[here.start]) + 1
    start, _ = text.chunks.rows(chunk)
    n_before = min(position, N_BEFORE)  # a prediction is about the token that follows
    first = start + position - n_before
    numbers = text.chunks.tokens[first : start + position + here.stop - here.start].tolist()
    shown = texts([text.spelled[number] for number in numbers])
    tokens = zip(
        shown[n_before:],
        values.kld[here].tolist(),
        np.exp(values.base_log_prob[here]).tolist(),
        np.exp(values.log_prob[here]).tolist(),
        _words(text, values.base_top[here]),
        _words(text, values.top[here]),
        values.base_top_p[here].tolist(),
        strict=True,
    )
    return Passage(
        chunk=chunk,
        position=position,
        kld=float(values.kld[here].mean()),
        before="".join(shown[:n_before]),
        tokens=tuple(ColouredToken(*token) for token in tokens),
    )


def _words(text: EvaluatedText, tokens: Ints) -> list[str]:
    """Spell tokens, each by itself; rows that only fill an output matrix have no text."""
    known = len(text.spelled)
    return [texts([text.spelled[token]])[0] if token < known else "?" for token in tokens.tolist()]
