"""Suites become chunks: those of `evaluate -f` for plain texts, and a tenth of them for a quick suite."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from gguf_tools.errors import BadRequest
from imatrix.texts.mixture import read_text
from imatrix.texts.suite import read_suite
from imatrix.texts.tokenise import ClassChunks, tokenise
from imatrix.texts.tokens import Cut
from tests.imatrix.evaluate.suite.chats import vocabulary

WORDS = "the quick brown fox jumps over the lazy dog and the naïve café owner "


def write(folder: Path, yaml: str = "context: 16", **texts: str) -> Path:
    (folder / "suite.yaml").write_text(yaml, encoding="utf-8")
    for name, text in texts.items():
        path = folder / name.replace("__", "/")
        path.parent.mkdir(exist_ok=True)
        path.with_name(f"{path.name}.txt").write_text(text, encoding="utf-8")
    return folder


def classes(folder: Path, *, add_bos: bool = False, quick: bool = False) -> dict[str, ClassChunks]:
    vocab = vocabulary(add_bos=add_bos)
    return {each.name: each for each in tokenise(read_suite(folder, quick), vocab, 10_000)}


@pytest.mark.parametrize("add_bos", [False, True])
def test_a_class_of_one_text_has_the_chunks_of_that_text(add_bos: bool, tmp_path: Path) -> None:
    write(tmp_path, one=WORDS * 20 + "\n")
    expected = read_text(tmp_path / "one.txt", vocabulary(add_bos=add_bos), 10_000, Cut(16)).chunks
    found = classes(tmp_path, add_bos=add_bos)["one"].chunks
    assert found.digest() == expected.digest()
    assert found.tokens.tolist() == expected.tokens.tolist()


def test_texts_of_a_class_are_cut_each_on_its_own(tmp_path: Path) -> None:
    write(tmp_path, all__a=WORDS * 5, all__b="b " * 40, all__c="short")
    found = classes(tmp_path, add_bos=True)["all"]
    vocab, paths = vocabulary(add_bos=True), (tmp_path / "all" / "a.txt", tmp_path / "all" / "b.txt")
    parts = [read_text(path, vocab, 10_000, Cut(16)) for path in paths]
    assert found.chunks.inputs.tolist() == np.concatenate([part.inputs.ravel() for part in parts]).tolist()
    assert found.chunks.starts == (0,)
    assert found.places[0] == "all/a.txt: chunk 1"
    assert found.places[parts[0].n_chunks] == "all/b.txt: chunk 1"
    assert len(found.places) == found.chunks.n_chunks
    assert found.notes == ("all/c.txt: 4 tokens, fewer than a chunk of 16",)


def test_all_tokens_may_be_scored(tmp_path: Path) -> None:
    write(tmp_path, "context: 4\nclasses: {one: {scored: all}, two: }", one=WORDS, two=WORDS)
    found = classes(tmp_path)
    assert found["one"].chunks.scored.reshape(-1, 4).tolist()[0] == [False, True, True, True]
    assert found["two"].chunks.scored.reshape(-1, 4).tolist()[0] == [False, False, False, True]


def test_quick_takes_a_tenth_of_the_whole_suites_chunks(tmp_path: Path) -> None:
    write(tmp_path, long=WORDS * 50, short=WORDS * 3, one="the quick brown fox jumps over")
    whole, quick = classes(tmp_path), classes(tmp_path, quick=True)
    assert quick["long"].places == whole["long"].places[4::10]
    short = whole["short"].places
    assert 5 <= len(short) < 15
    assert quick["short"].places == (short[len(short) // 4], short[3 * len(short) // 4])
    assert quick["one"].places == whole["one"].places
    assert len(quick["one"].places) == 1
    begin, end = whole["long"].chunks.rows(14)
    assert quick["long"].chunks.tokens[16:32].tolist() == whole["long"].chunks.tokens[begin:end].tolist()
    assert quick["long"].sha256 == whole["long"].sha256


def test_quick_takes_a_tenth_of_the_conversations(tmp_path: Path) -> None:
    lines = [
        {"messages": [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": f"{n}!"}]}
        for n in range(20)
    ]
    (tmp_path / "talk.jsonl").write_text("\n".join(map(json.dumps, lines)))
    found = classes(tmp_path, quick=True)["talk"]
    assert [place.rpartition("line ")[2] for place in found.places] == ["5", "15"]


def test_a_class_without_a_chunk_is_named(tmp_path: Path) -> None:
    write(tmp_path, fine=WORDS * 5, thin="short")
    with pytest.raises(BadRequest, match=r"class 'thin': no chunk of 16 tokens: thin.txt: 4 tokens"):
        classes(tmp_path)


def test_a_token_outside_the_vocabulary_is_refused(tmp_path: Path) -> None:
    write(tmp_path, one=WORDS * 5)
    with pytest.raises(BadRequest, match="outside of the vocabulary of 50"):
        tokenise(read_suite(tmp_path), vocabulary(), 50)
