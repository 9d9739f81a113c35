"""Added tokens that the tokenizers library finds otherwise than llama.cpp does."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pytest

from convert.tokenizer.files import KIMI, Quirks
from convert.tokenizer.tokenizer import read_tokenizer
from tests.convert.tokenizer.small_tokenizers import added, put, small, write_vocab_file
from tests.convert.tokenizer.test_vocab_spm import train_spm
from tests.support import oracle

FLAGS = ("lstrip", "rstrip", "single_word")
EXAMPLES = {
    "lstrip": "lstrip of '<tool>' is not carried over: llama.cpp keeps the space in 'a <tool>'",
    "rstrip": "rstrip of '<tool>' is not carried over: llama.cpp keeps the space in '<tool> a'",
    "single_word": "single_word of '<tool>' is not carried over: llama.cpp finds it in 'a<tool>a'",
}


def notes(folder: Path, **options: Any) -> list[str]:
    tokenizer = read_tokenizer(folder, {}, **options)
    return [note for note in tokenizer.notes if note.startswith("added tokens: ")]


def flagged(token_id: int, text: str, *flags: str) -> dict[str, Any]:
    return {**added(token_id, text), **dict.fromkeys(flags, True)}


@pytest.mark.parametrize("flag", FLAGS)
@pytest.mark.parametrize(
    "place", ["tokenizer.json", "its configuration", "a named token", "tokenizer.model", "tiktoken.model"]
)
def test_an_attribute_is_named(place: str, flag: str, tmp_path: Path) -> None:
    entry = flagged(8, "<tool>", flag)
    files = {
        "tokenizer.json": {"tokenizer_json": small(added_tokens=[*small()["added_tokens"], entry])},
        "its configuration": {
            "tokenizer_json": small(), "tokenizer_config_json": {"added_tokens_decoder": {"8": entry}},
        },
        "a named token": {"tokenizer_json": small(), "tokenizer_config_json": {"mask_token": entry}},
        "tokenizer.model": {"tokenizer_config_json": {"added_tokens_decoder": {"430": entry}}},
        "tiktoken.model": {"tokenizer_config_json": {"added_tokens_decoder": {"256": entry}}},
    }  # fmt: skip
    if place == "tokenizer.model":
        train_spm(tmp_path)
    if place == "tiktoken.model":
        lines = (base64.b64encode(bytes([byte])) + b" %d\n" % byte for byte in range(256))
        (tmp_path / place).write_bytes(b"".join(lines))
    put(tmp_path, **files[place])
    config = {"vocab_size": 431} if place == "tokenizer.model" else {}
    tokenizer = read_tokenizer(tmp_path, config, quirks=Quirks(tiktoken=KIMI))
    found = [note for note in tokenizer.notes if note.startswith("added tokens: ")]
    assert found == [f"added tokens: {EXAMPLES[flag]}"]


@pytest.mark.parametrize("seconds_before", [0.0, 1000.0], ids=["a new process", "an old one"])
def test_one_note_for_many(seconds_before: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("convert.tokenizer.added_tokens.time.thread_time", lambda: seconds_before)
    more = [flagged(8, "<a>", "lstrip", "rstrip"), flagged(9, "<b>", "lstrip"), flagged(10, "<c>", "lstrip")]
    put(tmp_path, tokenizer_json=small(added_tokens=[*small()["added_tokens"], *more]))
    (note,) = notes(tmp_path)
    assert "lstrip of '<a>' and 2 more is" in note
    assert "; rstrip of '<a>' is" in note


def test_a_whole_word_that_merges_make_too(tmp_path: Path) -> None:
    """Its id stands between letters then, where the library has not found the token."""
    content = small(added_tokens=[*small()["added_tokens"], flagged(2, "c", "single_word")])
    put(tmp_path, tokenizer_json=content)
    assert notes(tmp_path) == [
        "added tokens: single_word of 'c' is not carried over: llama.cpp finds it in 'aca'"
    ]


def test_a_token_that_the_normalizer_changes(tmp_path: Path) -> None:
    """Llama's puts ▁ before it; then the library finds it only behind a space."""
    content = small()["added_tokens"][0]
    prepend = {"type": "Sequence", "normalizers": [
        {"type": "Prepend", "prepend": "▁"}, {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
    ]}  # fmt: skip
    model = {"vocab": {"▁": 0, "a": 1, "<0x00>": 2}, "merges": [], "byte_fallback": True}
    for normalizer, normalized, expected in (prepend, True, 1), (prepend, False, 0), (None, True, 0):
        token = {**content, "id": 3, "content": "<x>", "normalized": normalized}
        put(
            tmp_path,
            tokenizer_json=small(
                model={"type": "BPE", **model}, added_tokens=[token], normalizer=normalizer,
                pre_tokenizer=None, decoder=None,
            ),
        )  # fmt: skip
        found = notes(tmp_path)
        assert len(found) == expected
        assert all("llama.cpp finds it in 'a<x>a'" in note for note in found)


@pytest.mark.parametrize(("name", "expected"), [("Phi-3 mini", 0), ("my phi3", 0), ("Phi 3 Mini", 1)])
def test_what_llama_cpp_does_for_phi_3(name: str, expected: int, tmp_path: Path) -> None:
    tokens = [added(6, "<s>"), flagged(7, "</s>", "rstrip"), added(8, "<unk>"), added(9, "<|endoftext|>")]
    put(tmp_path, tokenizer_json=small(added_tokens=[*tokens, flagged(10, "<|end|>", "rstrip")]))
    assert len(notes(tmp_path, model_name=name)) == expected


def test_a_name_with_which_llama_cpp_loads_no_file(tmp_path: Path) -> None:
    put(tmp_path, tokenizer_json=small())
    assert read_tokenizer(tmp_path, {}, model_name="My Phi3").notes[-1] == (
        "the name 'My Phi3' says Phi 3, and llama.cpp doesn't load the file for want of a token <unk>: give"
        " another --model-name"
    )


def test_a_token_beside_which_llama_cpp_strips_of_itself(tmp_path: Path) -> None:
    put(tmp_path, tokenizer_json=small())
    (note,) = notes(tmp_path, model_name="phi3")
    assert "no rstrip of '</s>' is not carried over: llama.cpp leaves out the space in '</s> a'" in note


@pytest.mark.skipif(not oracle.available(), reason="the xllamacpp wheel is not installed")
@pytest.mark.parametrize("flag", [*FLAGS, None])
def test_the_examples_are_true(flag: str | None, tmp_path: Path) -> None:
    """llama.cpp's ids of a note's example are other ones than the library's; without a note they agree."""
    from tokenizers import Tokenizer

    entry = flagged(8, "<tool>", *((flag,) if flag else ()))
    put(tmp_path, tokenizer_json=small(added_tokens=[*small()["added_tokens"], entry]))
    tokenizer = read_tokenizer(tmp_path, {})
    library = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    with oracle.Model(write_vocab_file(tmp_path / "vocab.gguf", tokenizer), vocab_only=True) as model:
        for other, example in (("lstrip", "a <tool>"), ("rstrip", "<tool> a"), ("single_word", "a<tool>a")):
            same = model.tokenize(example, parse_special=True) == library.encode(example).ids
            assert same == (flag != other)
