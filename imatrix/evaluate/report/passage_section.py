"""The passages where files are worst, coloured, with the words that base and file would have written."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from gguf_tools.text import html_text
from imatrix.evaluate.evaluation import Evaluation
from imatrix.evaluate.report.html import visible
from imatrix.evaluate.report.passages import ColouredToken, Passage, worst_passages

N_PASSAGES = 4
"""Number of passages that are shown for each file on one text."""

N_CHANGES = 4
"""Number of words that are shown for a passage."""

_N_LETTERS = 40
"""Letters that are shown before a word."""

_FULL_HEAT = 2.0
"""Divergence, in nats, from which a token has the deepest colour."""


def passage_sections(by_class: Mapping[Any, Evaluation]) -> Iterator[str]:
    """Yield the worst passages of each file: several of one text, or one of each class.

    by_class  class -> what was measured on it; None for a text that is alone
    """
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
            yield from _changes(passage)
        yield "</details>"


def _worst(by_class: Mapping[Any, Evaluation], number: int) -> list[tuple[str, Passage]]:
    """Return the worst passages of a file, the worst first, and what stands before their figures."""
    found = []
    for name, evaluation in by_class.items():
        tokens, count = evaluation.models[number].tokens, N_PASSAGES if len(by_class) == 1 else 1
        where = "" if name is None else f"{html_text(name)}: "
        found += [(where, passage) for passage in worst_passages(evaluation.text, tokens, count)]
    return sorted(found, key=lambda each: -each[1].kld)


def _changes(passage: Passage) -> Iterator[str]:
    """Yield what base and file would have written in the places that are farthest apart."""
    changes = passage.changes(N_CHANGES)
    if changes:
        yield '<ul class="changes">' + "".join(_change(*each) for each in changes) + "</ul>"


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
    tokens = "".join(
        f'<span style="--heat-share: {_heat(token.kld):.2f}"'
        f' title="KLD {token.kld:.4f}; probability {token.base_p:.2%} by the base, {token.p:.2%} here">'
        f"{visible(token.text)}</span>"
        for token in passage.tokens
    )
    return f'<p class="passage"><span class="before">{visible(passage.before)}</span>{tokens}</p>'


def _heat(kld: float) -> float:
    """Scale a token's colour, 0 to 0.9."""
    return 0.9 * min(1.0, max(0.0, kld) / _FULL_HEAT) ** 0.5
