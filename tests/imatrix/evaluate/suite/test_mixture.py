"""Folders of classes become chunks in equal shares; a file stays what it is."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from gguf_tools.errors import BadRequest
from imatrix.texts.mixture import mixture_sha256, read_text
from imatrix.texts.tokens import Cut, Text
from tests.imatrix.evaluate.suite.chats import ASKED, BOS, SAYS, vocabulary

WORDS = "the quick brown fox jumps over the lazy dog and the naïve café owner "


def read(path: Path, cut: Cut, *, add_bos: bool = False) -> Text:
    return read_text(path, vocabulary(add_bos=add_bos), 10_000, cut)


def write(folder: Path, **texts: str) -> Path:
    """Write texts; `a__b` is b.txt in the folder a."""
    for name, text in texts.items():
        path = folder / f"{name.replace('__', '/')}.txt"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return folder


def write_chats(path: Path, *conversations: list[dict[str, object]]) -> None:
    path.write_text("\n".join(json.dumps({"messages": each}) for each in conversations))


@pytest.mark.parametrize("add_bos", [False, True])
def test_a_class_of_one_file_has_the_chunks_of_that_file(add_bos: bool, tmp_path: Path) -> None:
    write(tmp_path, one=WORDS * 20 + "\n")
    alone = read(tmp_path / "one.txt", Cut(16), add_bos=add_bos)
    expected = read_text(tmp_path / "one.txt", vocabulary(add_bos=add_bos), 10_000, Cut(16))
    assert alone.chunks.digest() == expected.chunks.digest()
    assert (alone.classes, alone.notes) == ((), ())
    found = read(tmp_path, Cut(16), add_bos=add_bos)
    assert found.classes == ("one",) * expected.n_chunks
    assert sorted(found.tokens.tolist()) == sorted(expected.tokens.tolist())
    assert sorted(found.inputs.tolist()) == sorted(expected.inputs.tolist())


def tokens_of(letter: str, n: int) -> str:
    """Return a text of `n` tokens, all of which spell the letter."""
    return " ".join([letter] * n)


@pytest.mark.parametrize(
    ("cut", "shares"),
    [
        (Cut(16, n_chunks=3), (1, 1, 1)),
        (Cut(16, n_chunks=7), (3, 2, 2)),
        (Cut(16, n_chunks=9), (4, 2, 3)),
        (Cut(16, n_chunks=30), (14, 2, 14)),
        (Cut(16, from_chunk=3, n_chunks=3), (1, 1, 1)),
        (Cut(16), (16, 2, 20)),
    ],
)
def test_classes_share_equally_as_far_as_they_go(cut: Cut, shares: tuple[int, ...], tmp_path: Path) -> None:
    write(tmp_path, a=tokens_of("a", 260), b=tokens_of("b", 32), c=tokens_of("c", 320))
    found = read(tmp_path, cut)
    assert tuple(Counter(found.classes)[name] for name in "abc") == shares
    for name, chunk in zip(found.classes, found.tokens.tolist(), strict=True):
        assert set(spelling(chunk)) - {"Ġ"} == {name}


def spelling(tokens: list[int]) -> str:
    return "".join(vocabulary()["tokenizer.ggml.tokens"].data[token] for token in tokens)


def test_first_chunks_are_those_of_a_shorter_run(tmp_path: Path) -> None:
    write(tmp_path, a=WORDS * 30, b="b " * 300, c__one=WORDS * 9, c__two="c " * 90)
    whole, short = read(tmp_path, Cut(16)), read(tmp_path, Cut(16, n_chunks=8))
    assert short.classes == whole.classes[:8]
    assert np.array_equal(short.tokens, whole.tokens[:8])


@pytest.mark.parametrize("n_chunks", [2, 5, 13])
def test_chunks_of_a_class_come_from_all_over_it(n_chunks: int, tmp_path: Path) -> None:
    write(tmp_path, numbers=" ".join(str(number) for number in range(1000, 3000)))
    in_order = read_text(tmp_path / "numbers.txt", vocabulary(), 10_000, Cut(16)).tokens.tolist()
    found = read(tmp_path, Cut(16, n_chunks=n_chunks)).tokens.tolist()
    places = sorted(in_order.index(chunk) / len(in_order) for chunk in found)
    assert max(np.diff([*places, 1.0])) < 2 / n_chunks


@pytest.mark.parametrize("add_bos", [False, True])
def test_short_texts_of_a_class_follow_each_other(add_bos: bool, tmp_path: Path) -> None:
    write(tmp_path, notes__a=tokens_of("a", 6) + "\n", notes__b=tokens_of("b", 5), notes__c="c c c c c\n")
    (chunk,) = read(tmp_path, Cut(16), add_bos=add_bos).tokens.tolist()
    letters = spelling(chunk).replace("Ġ", "").replace("Ċ", " ")
    expected = f"{BOS}aaaaaa {BOS}bbbbb{BOS}c" if add_bos else "aaaaaa bbbbbcccc"
    assert letters == expected


def test_conversations_are_rendered_and_what_is_left_out_is_told(tmp_path: Path) -> None:
    template = "{% if messages|length > 3 %}{{ raise_exception('too long') }}{% endif %}" \
        "{% for message in messages %}<s>{{ message.content }}</s>{% endfor %}"  # fmt: skip
    write(tmp_path, words=WORDS * 10)
    (tmp_path / "short.jinja").write_text(template)
    (tmp_path / "suite.yaml").write_text("classes: {words: , talk: {template: short.jinja}}")
    write_chats(tmp_path / "talk.jsonl", [ASKED, SAYS] * 2, *[[ASKED, SAYS]] * 3)
    found = read(tmp_path, Cut(16))
    assert set(found.classes) == {"words", "talk"}
    talk = [chunk for name, chunk in zip(found.classes, found.tokens.tolist(), strict=True) if name == "talk"]
    assert any(spelling(chunk).startswith(f"{BOS}When") for chunk in talk)
    (note,) = found.notes
    assert "talk.jsonl: line 1" in note
    assert "too long" in note


@pytest.mark.parametrize(
    ("cut", "message"),
    [
        (Cut(64), r"/b: 5 tokens, expected a chunk of 64 or more; see chunk_size"),
        (Cut(4, from_chunk=999), r"\d+ chunks of 4 tokens, and from_chunk=999"),
    ],
)
def test_what_leaves_nothing_is_refused(cut: Cut, message: str, tmp_path: Path) -> None:
    write(tmp_path, a=WORDS * 20, b=tokens_of("b", 5))
    with pytest.raises(BadRequest, match=message):
        read(tmp_path, cut)


def test_another_word_class_or_template_gives_another_digest(tmp_path: Path) -> None:
    write(tmp_path, a="one", b__c="two")
    write_chats(tmp_path / "talk.jsonl", [ASKED, SAYS])
    seen = [mixture_sha256(tmp_path)]
    (tmp_path / "a.txt").write_text("ones")
    seen.append(mixture_sha256(tmp_path))
    (tmp_path / "a.txt").rename(tmp_path / "d.txt")
    seen.append(mixture_sha256(tmp_path))
    (tmp_path / "suite.yaml").write_text("classes: {b: , d: , talk: {template: plain}}")
    seen.append(mixture_sha256(tmp_path))
    assert len(set(seen)) == 4


def test_a_text_knows_its_digest(tmp_path: Path) -> None:
    write(tmp_path, a=WORDS * 20, b=WORDS * 30)
    for path in (tmp_path, tmp_path / "a.txt"):
        assert read(path, Cut(16)).sha256 == mixture_sha256(path)
