"""The passages where files are worst: runs of tokens with the largest mean divergence.

They are coloured, with the words that base and file would have written.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from gguf_tools.text import html_text
from gguf_tools.web_page import visible
from imatrix.evaluate.divergence import Ints, TokenValues
from imatrix.evaluate.evaluation import ClassEvaluation
from imatrix.texts.spelling import texts
from imatrix.texts.tokenise import ClassChunks

N_TOKENS = 40
"""Number of tokens in a passage."""

N_BEFORE = 24
"""Number of tokens that are shown before a passage, as context."""

N_PASSAGES = 4
"""Number of passages that are shown for each file on one text."""

N_CHANGES = 4
"""Number of words that are shown for a passage."""

_N_LETTERS = 40
"""Letters that are shown before a word."""

_FULL_HEAT = 2.0
"""Divergence, in nats, from which a token has the deepest colour."""


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


def worst_passages(text: ClassChunks, values: TokenValues, count: int) -> tuple[Passage, ...]:
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


def _passage(text: ClassChunks, values: TokenValues, here: slice) -> Passage:
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


def _words(text: ClassChunks, tokens: Ints) -> list[str]:
    """Spell tokens, each by itself; rows that only fill an output matrix have no text."""
    known = len(text.spelled)
    return [texts([text.spelled[token]])[0] if token < known else "?" for token in tokens.tolist()]


def passage_sections(by_class: Mapping[str, ClassEvaluation]) -> Iterator[str]:
    """Yield the worst passages of each file: several of one text, or one of each class."""
    yield "<h2>Where a file is worst</h2>"
    yield (
        '<p class="note">The passages with the largest mean divergence. The deeper the colour of a token,'
        " the farther its prediction is from the base's; from"
        f" {_FULL_HEAT:g} nats on it is deepest. Grey text comes before. Below are the words that the file"
        " would have written where the base has another one.</p>"
    )
    first, *_ = by_class.values()
    for number, model in enumerate(first.models):
        name = html_text(model.path.name)
        yield f"<details{' open' if number == 0 else ''}><summary>{name}</summary>"
        for where, passage in _worst(by_class, number):
            place = f"chunk {passage.chunk + 1}, token {passage.position}"
            yield f'<p class="note">{where}KLD {passage.kld:.4f}, {place}</p>'
            yield _coloured(passage)
            changes = passage.changes(N_CHANGES)
            if changes:
                yield '<ul class="changes">' + "".join(_change(*each) for each in changes) + "</ul>"
        yield "</details>"


def _worst(by_class: Mapping[str, ClassEvaluation], number: int) -> list[tuple[str, Passage]]:
    """Return the worst passages of a file, the worst first, and what stands before their figures."""
    found = []
    for name, evaluation in by_class.items():
        tokens, count = evaluation.models[number].tokens, N_PASSAGES if len(by_class) == 1 else 1
        where = "" if evaluation.text.is_alone else f"{html_text(name)}: "
        found += [(where, passage) for passage in worst_passages(evaluation.text, tokens, count)]
    return sorted(found, key=lambda each: -each[1].kld)


def _change(before: str, token: ColouredToken) -> str:
    before = " ".join(before.split())[-_N_LETTERS:]
    return (
        f'<li><span class="before">\u2026{visible(before)}</span> base {_word(token.base_word)}'
        f" ({token.base_word_p:.0%}), file {_word(token.word)}, text {_word(token.text)}</li>"
    )


def _word(text: str) -> str:
    """Show a token on one line, with its spaces."""
    shown = visible(text.replace(" ", "\u2423"))
    return f"<b>{shown.replace(chr(10), '')}</b>"


def _coloured(passage: Passage) -> str:
    heats = (0.9 * min(1.0, max(0.0, token.kld) / _FULL_HEAT) ** 0.5 for token in passage.tokens)
    tokens = "".join(
        f'<span style="--heat-share: {heat:.2f}"'
        f' title="KLD {token.kld:.4f}; probability {token.base_p:.2%} by the base, {token.p:.2%} here">'
        f"{visible(token.text)}</span>"
        for heat, token in zip(heats, passage.tokens, strict=True)
    )
    return f'<p class="passage"><span class="before">{visible(passage.before)}</span>{tokens}</p>'
