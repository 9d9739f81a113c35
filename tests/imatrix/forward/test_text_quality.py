"""Texts judged by their tokens: nonsense is told from ordinary texts, whatever their kind and size."""

from __future__ import annotations

import inspect
import json
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from gguf_tools.errors import BadRequest
from gguf_tools.findings import Finding, Level, tell_nobody
from imatrix.texts.quality import PASSAGE, TextQuality, admit, judge
from imatrix.texts.tokens import Text

Encode = Callable[[str], np.ndarray]
ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def encode() -> Encode:
    """Return the sample model's token ids of a text."""
    from tokenizers import Tokenizer

    library = Tokenizer.from_file(str(ROOT / "examples" / "tiny-deepseek-v3" / "tokenizer.json"))
    return lambda text: np.array(library.encode(text, add_special_tokens=False).ids, np.int64)


def judged(tokens: np.ndarray, size: int | None = None) -> TextQuality:
    """Judge the first `size` tokens, or all."""
    tokens = tokens[None, :size]
    return judge(Text(tokens, tokens))


def kinds(quality: TextQuality) -> list[str]:
    return [finding.kind for finding in quality.findings()]


def numbers() -> str:
    return json.dumps({f"key {n}": [n * 7919 % 1000, {"name": f"n{n % 17}"}] for n in range(2000)}, indent=1)


ORDINARY = {
    "prose": lambda: (ROOT / "LICENSE").read_text() + (ROOT / "README.md").read_text(),
    "calibration": lambda: (ROOT / "examples/tiny-deepseek-v3/calibration.txt").read_text()[:60000],
    "code": lambda: inspect.getsource(inspect) + inspect.getsource(random),
    "JSON": numbers,
    "table": lambda: "\n".join(f"{n}\t{n * n % 997}\t{'yes' if n % 3 else 'no'}" for n in range(5000)),
    "Russian": lambda: (
        "Съешь же ещё этих мягких французских булок, да выпей чаю. Широкая электрификация южных губерний даст"
        " мощный толчок подъёму сельского хозяйства. В чащах юга жил бы цитрус? Да, но фальшивый экземпляр!"
    ),
}

NONSENSE = {
    "one token": "the " * 40000,
    "one letter": "a" * 80000,
    "newlines": "\n" * 80000,
    "spaces": " " * 200000,
    "zeros": "0" * 80000,
    "NUL": "\0" * 40000,
    "two tokens in turn": "yes no " * 20000,
    "a line, copied": "All work and no play makes Jack a dull boy.\n" * 3000,
    "a paragraph, copied": (ROOT / "LICENSE").read_text()[:700] * 200,
}


@pytest.mark.parametrize("kind", ORDINARY)
@pytest.mark.parametrize("size", [16, 64, 512, 2048, 8192, 16384])
def test_ordinary_texts_are_no_nonsense(encode: Encode, kind: str, size: int) -> None:
    quality = judged(encode(ORDINARY[kind]()), size)
    assert set(kinds(quality)) <= {"thin text"}


@pytest.mark.parametrize("kind", NONSENSE)
def test_nonsense_is_found(encode: Encode, kind: str) -> None:
    quality = judged(encode(NONSENSE[kind]))
    assert quality.is_nonsense
    with pytest.raises(BadRequest, match=r"x\.txt: the text (is monotonous|repeats itself).*force=True"):
        admit(_text(encode(NONSENSE[kind])), "x.txt", tell_nobody, any_text=False)


def _text(tokens: np.ndarray) -> Text:
    return Text(tokens[None], tokens[None])


def test_forced_nonsense_is_told(encode: Encode) -> None:
    told: list[Finding] = []
    admit(_text(encode(NONSENSE["newlines"])), "x.txt", told.append, any_text=True)
    (finding,) = told
    assert finding.level is Level.BAD
    assert "can be worse than a file made without it" in finding.text


@pytest.mark.parametrize("kind", ["tokens", "bytes", "base64", "digits"])
def test_random_order_is_told_and_not_refused(encode: Encode, kind: str) -> None:
    rng = np.random.default_rng(0)
    letters = {
        "bytes": "".join(map(chr, range(256))),
        "base64": "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/",
        "digits": "0123456789",
    }
    if kind == "tokens":
        tokens = rng.integers(10, 4096, 10000)
    else:
        tokens = encode("".join(rng.choice(list(letters[kind]), 40000)))
    quality = judged(tokens)
    assert kinds(quality) == ["no order"]
    assert not quality.is_nonsense


def test_short_texts_are_thin(encode: Encode) -> None:
    tokens = encode(ORDINARY["calibration"]())
    assert kinds(judged(tokens, 1024)) == ["thin text"]
    assert kinds(judged(tokens, 4096)) == []


def test_copies_count_once(encode: Encode) -> None:
    tokens = encode(ORDINARY["calibration"]())[:3000]
    once, twice = judged(tokens), judged(np.concatenate([tokens, tokens]))
    assert twice.n_tokens - twice.n_copied == once.n_tokens - once.n_copied


def test_copied_passages_are_those_of_a_plain_search() -> None:
    rng = np.random.default_rng(1)
    tokens = rng.integers(0, 3, 300)
    tokens[200:260] = tokens[40:100]
    seen, copied = set[bytes](), np.zeros(len(tokens), bool)
    for start in range(len(tokens) - PASSAGE + 1):
        passage = tokens[start : start + PASSAGE].tobytes()
        copied[start : start + PASSAGE] |= passage in seen
        seen.add(passage)
    assert copied.sum() >= 60
    assert judged(tokens).n_copied == copied.sum()


def test_one_token_can_be_judged() -> None:
    quality = judged(np.array([5]))
    assert (quality.n_distinct, quality.variety, quality.n_copied) == (1, 1, 0)
    assert not quality.is_nonsense
