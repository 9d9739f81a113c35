"""Byte-level BPE vocabularies: types, padding, added tokens, and files that contradict themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from convert.tokenizer.vocab import TokenType
from gguf_tools.errors import BadTokenizer
from gguf_tools.format.values import Value
from tests.convert.tokenizer.small_tokenizers import added, put, read, small, with_model

NORMAL, CONTROL = TokenType.NORMAL, TokenType.CONTROL
USER_DEFINED, UNUSED = TokenType.USER_DEFINED, TokenType.UNUSED


def test_types_texts_and_padding(tmp_path: Path) -> None:
    content = small()
    content["added_tokens"] += [
        added(8, "<｜User｜>", special=False, normalized=True),  # not marked, but looks it
        added(9, "<think>", special=False, normalized=True),
        added(10, "▁x", special=False),  # printed with a space
        added(11, "Ġz", special=False),  # not normalized: printed as its bytes say
        added(12, "ø", special=False),  # a byte that is no text by itself keeps its spelling
    ]
    tokenizer = read(put(tmp_path, tokenizer_json=content), 16)
    assert tokenizer.vocab.tokens[5:] == (
        "Ġab", "<s>", "</s>", "<｜User｜>", "<think>", " x", " z", "ø", "[PAD13]", "[PAD14]", "[PAD15]",
    )  # fmt: skip
    assert tokenizer.vocab.types[5:] == (
        NORMAL, CONTROL, CONTROL, CONTROL, USER_DEFINED, USER_DEFINED, USER_DEFINED, USER_DEFINED,
        UNUSED, UNUSED, UNUSED,
    )  # fmt: skip
    assert "3 rows of the embedding have no token: written as [PADn]" in tokenizer.notes


def test_merges_as_pairs(tmp_path: Path) -> None:
    content = small()
    content["model"]["merges"] = [["a", "b"], ["Ġ", "ab"]]
    assert read(put(tmp_path, tokenizer_json=content)).vocab.merges == ("a b", "Ġ ab")


def test_a_space_inside_a_merge_is_written_as_its_byte(tmp_path: Path) -> None:
    content = small()
    content["model"] |= {"vocab": {"a": 0, " ": 1, " a": 2, "a a": 3}, "merges": [[" ", "a"], ["a", " a"]]}
    content["added_tokens"] = []
    assert read(put(tmp_path, tokenizer_json=content)).vocab.merges == ("Ġ a", "a Ġa")


def test_tokens_of_tokenizer_config_are_added_as_transformers_does(tmp_path: Path) -> None:
    config = {
        "added_tokens_decoder": {
            "7": {"content": "</s>", "special": False},
            "8": {"content": "<new>", "special": False, "normalized": True},
            "9": {"content": "<too many>", "special": False},
        },
        "bos_token": "<s>",
        "eos_token": {"content": "</s>"},
        "pad_token": "c",  # a plain token becomes a control token by being named
        "unk_token": "<nowhere>",
    }
    tokenizer = read(put(tmp_path, tokenizer_json=small(), tokenizer_config_json=config), 9)
    assert tokenizer.vocab.tokens[6:] == ("<s>", "</s>", "<new>")
    assert [tokenizer.vocab.types[i] for i in (2, 6, 7, 8)] == [CONTROL, CONTROL, USER_DEFINED, USER_DEFINED]
    assert tokenizer.special.ids == {"bos": 6, "eos": 7, "pad": 2}
    assert (
        "tokenizer_config.json: token '<too many>' has no row in the embedding: left out" in tokenizer.notes
    )
    assert any("'<nowhere>' is in no vocabulary" in note for note in tokenizer.notes)


# --- bad files --------------------------------------------------------------------------------------------


BAD_FILES: dict[str, tuple[Any, str]] = {
    "not JSON": ("{", r"tokenizer\.json: not JSON"),
    "an array": ([], r"tokenizer\.json: holds list, expected a JSON object"),
    "word level": (with_model(type="WordLevel"), r"model is WordLevel, expected a byte-level BPE"),
    "SentencePiece": (with_model(byte_fallback=True), r"model is BPE with byte_fallback, expected"),
    "a vocabulary that is a number": (with_model(byte_fallback=True, vocab=3), "expected a byte-level BPE"),
    "not the library's form": (with_model(vocab=[]), r"the tokenizers library can't read it"),
    "a pre-tokenizer that is a list": (small(pre_tokenizer=[]), r"the tokenizers library can't read it"),
    "same id twice": (
        with_model(vocab={"a": 0, "b": 1, "c": 1, "Ġ": 2, "ab": 3, "Ġab": 4}),
        r"'b' and 'c' have the same id 1",
    ),
    "a hole": (
        {**with_model(vocab={"a": 0, "b": 1, "ab": 9}, merges=["a b"]), "added_tokens": []},
        r"no token has id 2, though ids go up to 9: the vocabulary is damaged",
    ),
    "an added token with a taken id": (
        small(added_tokens=[added(3, "<s>")]),
        r"added token '<s>' is given id 3, but the tokenizers library makes it 6",
    ),
    "more tokens than rows": (
        small(added_tokens=[added(6, "<s>"), added(7, "</s>"), added(8, "<x>")]),
        r"token '<x>' has id 8, but config\.json says vocab_size 8",
    ),
    "word endings": (with_model(end_of_word_suffix="</w>"), r"model\.end_of_word_suffix is '</w>'"),
}


@pytest.mark.parametrize(("content", "message"), BAD_FILES.values(), ids=BAD_FILES.keys())
def test_bad_tokenizer_json(content: Any, message: str, tmp_path: Path) -> None:
    put(tmp_path, tokenizer_json=content)
    with pytest.raises(BadTokenizer, match=message) as caught:
        read(tmp_path, 8)
    assert "\n" not in str(caught.value)
    assert str(tmp_path) in str(caught.value)


def test_bad_added_tokens_decoder(tmp_path: Path) -> None:
    put(
        tmp_path, tokenizer_json=small(), tokenizer_config_json={"added_tokens_decoder": {"6": {"text": "x"}}}
    )
    with pytest.raises(BadTokenizer, match=r"tokenizer_config\.json: added_tokens_decoder can't be read"):
        read(tmp_path)


def test_no_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(BadTokenizer, match=r"no tokenizer\.json and no tokenizer\.model$"):
        read(tmp_path)
    put(tmp_path, tiktoken_model="")
    with pytest.raises(
        BadTokenizer, match=r"found tiktoken\.model: save the tokenizer as tokenizer\.json first"
    ):
        read(tmp_path)


def test_a_normalizer_is_named_in_the_notes(tmp_path: Path) -> None:
    normalizers = [{"type": "NFC"}, {"type": "Lowercase"}]
    tokenizer = read(
        put(tmp_path, tokenizer_json=small(normalizer={"type": "Sequence", "normalizers": normalizers}))
    )
    assert "normalizer NFC is not applied: llama.cpp's BPE takes text as it is" in tokenizer.notes
    assert tokenizer.metadata()["tokenizer.ggml.normalizer.lowercase"] == Value.bool_(True)


def test_added_tokens_that_are_not_used(tmp_path: Path) -> None:
    """transformers reads added_tokens.json where there is no tokenizer.json."""
    put(tmp_path, tokenizer_json=small(), added_tokens_json={"<s>": 6, "</s>": 7})
    assert not [note for note in read(tmp_path).notes if "added_tokens.json" in note]
    put(tmp_path, added_tokens_json={"<s>": 6, "</s>": [], "<x>": 8})
    assert [note for note in read(tmp_path).notes if "added_tokens.json" in note] == [
        "added_tokens.json: token '</s>' and 1 more is not in tokenizer.json under its id: left out"
    ]
