"""Whether a text is worth learning from, judged by its tokens before anything is computed.

Importances and calibrated files fit the text that they were made with. A text of one repeated token shows a
model a single direction, and rows of it that are held back show the same one. So nonsense is refused.

The thresholds stand between these extremes, of 52 ordinary texts and of nonsense, at up to nine places of
each, cut by two tokenizers (4096 and 100015 tokens). The ordinary ones are prose, licences, READMEs, manual
pages in 10 languages, a book in Chinese, Japanese, Korean and Spanish, source in 8 languages, HTML, JSON,
XML, SVG, tables and logs.

    tokens                                       512        2048        8192       32768
    variety        ordinary, smallest             13          16          19          22
                   random digits                 9.8          10          10          10
                   two tokens in turn            2.1         2.0         2.0         2.0
                   one token, EOS, newlines      1.0         1.0         1.0         1.0
    copied share   ordinary, largest            0.75        0.82        0.80        0.70
                   a paragraph, copied          0.66        0.92        0.98        0.99
                   a line, copied               0.97        0.99        1.00        1.00
    order          ordinary, smallest           0.16        0.34        0.77        1.25
                   random, largest              0.21        0.33        0.51        0.84

The effective rank of what the first layer multiplies puts texts in the same order as their variety does
(ordinary 6.4 to 33, two tokens 2.0, one token 1.0, whatever their length), so it is not computed. That of the
inputs of all matrices tells no more: on examples/small-llama, 2048 tokens, its median was 3.8 to 5.3 for
ordinary texts, 3.6 for shuffled words, 4.5 for random tokens, 3.3 for copies of a paragraph, 1.9 for digits,
and 1.0 to 1.1 for newlines, spaces and two tokens in turn, which their variety tells.

Texts in random order (bytes, base64, digits, words, tokens) are told and not refused: they serve less well
than ordinary ones, and better than none. docs/calibrated.md has what files of each kind of text are worth.
"""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from gguf_tools.errors import BadRequest
from gguf_tools.findings import Finding, Level, Tell
from imatrix.texts.chunks import Chunks
from imatrix.texts.tokens import Text

PASSAGE = 32
"""Tokens of a passage that counts as copied if it stood in the text before: a power of two."""

_LEAST_VARIETY = 8.0
"""Between the 2 of two tokens in turn and the 13 of ordinary texts; of n tokens, fewer than 256, sqrt(n) / 2.
There 16 and 64 tokens of ordinary texts have 4.2 and 7.4."""

_MOST_COPIED = 0.95
"""Ordinary texts reach 0.82: logs, JSON of a schema, generated headers."""

_FEW_TOKENS = 2048
"""Tokens that are no copies, below which a text is thin."""

_NEARLY_ALL = 0.99
"""Share of the letters of a text that is in one script alone."""

_ORDER_TOKENS, _LEAST_ORDER = 8192, 0.6
"""Tokens at the beginning in which order is measured, and between the 0.51 of random texts and 0.77."""


@dataclass(frozen=True)
class TextQuality:
    """Quality of a text, as its tokens show it.

    n_tokens    of all chunks
    n_distinct  different ones among them
    variety     number of tokens that would be as varied if each were equally frequent: 2 ** entropy in bits
    n_copied    tokens in passages of 32 or more that stood in the text before
    order       bits that a token says about the next one, beyond what it says when the tokens are shuffled;
                None for a text that is too short to tell
    """

    n_tokens: int
    n_distinct: int
    variety: float
    n_copied: int
    order: float | None

    @property
    def copied(self) -> float:
        """The share of the tokens that are copies, 0 to 1."""
        return self.n_copied / self.n_tokens

    @property
    def is_nonsense(self) -> bool:
        """Whether the text shows so little that what is made with it is made for this text alone."""
        return any(finding.is_bad for finding in self.findings())

    def findings(self) -> Iterator[Finding]:
        """Yield what a user should know; BAD for nonsense."""
        n, fresh = self.n_tokens, self.n_tokens - self.n_copied
        if self.variety < min(_LEAST_VARIETY, n**0.5 / 2):
            yield Finding(
                "monotonous text",
                f"the text is monotonous: {n:,} tokens, {self.n_distinct:,} of them different, as varied as"
                f" {self.variety:.1f} that are equally frequent; ordinary texts have 13 and more",
                Level.BAD,
            )
        elif self.copied >= _MOST_COPIED:
            yield Finding(
                "copied text",
                f"the text repeats itself: {100 * self.copied:.1f} % of its {n:,} tokens are copies of"
                f" passages before them, and {fresh:,} are left",
                Level.BAD,
            )
        elif fresh < _FEW_TOKENS:
            copies = f", of which {self.n_copied:,} are copies" if self.n_copied else ""
            yield Finding(
                "thin text",
                f"the text is thin: {n:,} tokens{copies}; {_FEW_TOKENS:,} and more show more of the model",
            )
        elif self.order is not None and self.order < _LEAST_ORDER:
            yield Finding(
                "no order",
                "the text's tokens follow each other as if shuffled: what is made with it serves ordinary"
                " text less well than it could",
            )


def judge(text: Text | Chunks) -> TextQuality:
    """Judge a text by its tokens."""
    tokens = text.tokens.ravel()
    return TextQuality(
        n_tokens=tokens.size,
        n_distinct=np.unique(tokens).size,
        variety=2 ** _entropy(tokens),
        n_copied=int(_copied(tokens).sum()),
        order=_order(tokens[:_ORDER_TOKENS]) if tokens.size >= _ORDER_TOKENS else None,
    )


def admit(text: Text, name: str, tell: Tell, *, any_text: bool) -> TextQuality:
    """Judge a text before it is used, tell what a user should know, and return the judgement.

    name      the text's, for messages
    any_text  use nonsense, too, after saying that it is
    raises    BadRequest for nonsense
    """
    quality = judge(text)
    for note in text.notes:
        tell(Finding("left out", note, Level.NOTE))
    for finding in quality.findings():
        if finding.is_bad and not any_text:
            raise BadRequest(
                f"{name}: {finding.text}; expected a text of the kind that the model is for (--force uses it)"
            )
        doubt = "; a file made with it can be worse than a file made without it" if finding.is_bad else ""
        tell(Finding(finding.kind, f"{name}: {finding.text}{doubt}", finding.level))
    return quality


def _entropy(values: npt.NDArray[np.integer[Any]]) -> float:
    """Return the entropy of how often values occur, in bits."""
    _, counts = np.unique(values, return_counts=True)
    shares = counts / counts.sum()
    return float(-(shares * np.log2(shares)).sum())


def _copied(tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """Find the tokens in a passage of PASSAGE tokens that stood in the text before, bool (n,)."""
    if tokens.size < PASSAGE:
        return np.zeros(tokens.size, np.bool_)
    hashes, length = tokens.astype(np.uint64), 1
    while length < PASSAGE:  # of passages twice as long, from those of both halves
        hashes = _mixed(_mixed(hashes[:-length]) + hashes[length:])
        length *= 2
    is_later = np.ones(hashes.size, np.bool_)
    is_later[np.unique(hashes, return_index=True)[1]] = False
    begun = np.cumsum(np.concatenate([is_later, np.zeros(PASSAGE - 1, np.bool_)]))
    ended = np.concatenate([np.zeros(PASSAGE, begun.dtype), begun[:-PASSAGE]])
    return begun > ended


def _mixed(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Return values whose bits all depend on all bits of those given (the finalizer of splitmix64)."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _order(tokens: npt.NDArray[np.int64]) -> float:
    """Measure how much less varied pairs of neighbours are than those of the shuffled tokens, in bits."""
    shuffled = np.random.default_rng(0).permutation(tokens)
    return _entropy(_pairs(shuffled)) - _entropy(_pairs(tokens))


def _pairs(tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return a number for each pair of neighbours, another one for each kind."""
    return tokens[:-1] * (tokens.max() + 1) + tokens[1:]


def script_findings(text: str) -> Iterator[Finding]:
    """Yield a note on a text in one script alone: what it teaches may not hold for texts in others.

    On SmolLM2-135M, files that were calibrated on English had 1.16 (Q2_K) and 1.20 (Q4_K_M) of stock's
    divergence on Arabic, Chinese, Cyrillic, Devanagari, Hangul and Japanese, and 0.5 to 0.8 on texts in
    English and on code.
    """
    scripts: Counter[str] = Counter()
    for character, count in Counter(text).items():
        if character.isalpha():
            # The script begins a letter's name in Unicode: LATIN SMALL LETTER A.
            scripts[unicodedata.name(character, "UNKNOWN").split()[0].split("-")[0].capitalize()] += count
    if not scripts:
        return
    ((script, count),) = scripts.most_common(1)
    if count >= _NEARLY_ALL * scripts.total():
        share = f"{100 * count / scripts.total():.1f} %"
        yield Finding(
            "one script",
            f"{share} of the text's letters are {script}: in other scripts the file may be worse than without"
            " --calibrate; add some text of each that it is for",
            Level.NOTE,
        )
