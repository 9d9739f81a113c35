"""Parts of a tokenizer.json that llama.cpp leaves out: a note each, with a text that it cuts otherwise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from convert.tokenizer import pipeline_notes
from convert.tokenizer.files import LLAMA, NO_QUIRKS, Quirks
from convert.tokenizer.tokenizer import Tokenizer, read_tokenizer
from gguf_tools.errors import BadTokenizer
from tests.convert.tokenizer.small_tokenizers import added, put, read, small, with_model, write_vocab_file
from tests.convert.tokenizer.test_special_tokens import template
from tests.support import oracle
from tests.support.gemma_tokenizer import write_gemma_tokenizer

SPACE = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
PREFIX = {"type": "Prepend", "prepend": "▁"}
BACK = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
GEMMA_4 = Quirks(merged_pieces=())
PIECES = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]


def normalizer(*steps: dict[str, Any]) -> dict[str, Any]:
    return {"normalizer": {"type": "Sequence", "normalizers": list(steps)}}


def metaspace(scheme: str = "always", *, split: bool = False, replacement: str = "▁") -> dict[str, Any]:
    step = {"type": "Metaspace", "replacement": replacement, "prepend_scheme": scheme, "split": split}
    return {"normalizer": None, "pre_tokenizer": step}


def put_pieces(folder: Path, *more: str, model: dict[str, Any] | None = None, **changes: Any) -> Path:
    """Write a tokenizer.json of SentencePiece's tokens: all bytes, a, b, ▁, `more`; and Llama's pipeline."""
    tokens = [*PIECES, "▁", "a", "b", *more]
    merges = [[token[:-1], token[-1]] for token in more if len(token) > 1]
    content = {
        "version": "1.0", "added_tokens": [added(i, text) for i, text in enumerate(PIECES[:3])],
        **normalizer(PREFIX, SPACE), "pre_tokenizer": None, "post_processor": None,
        "decoder": {"type": "Sequence", "decoders": [
            BACK, {"type": "ByteFallback"}, {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0},
        ]},
        "model": {"type": "BPE", "byte_fallback": True, "unk_token": "<unk>", "merges": merges,
                  "vocab": {token: token_id for token_id, token in enumerate(tokens)}, **(model or {})},
    }  # fmt: skip
    names = {"bos_token": "<s>", "eos_token": "</s>"}
    return put(folder, tokenizer_json={**content, **changes}, tokenizer_config_json=names)


def lost(folder: Path, quirks: Quirks = NO_QUIRKS) -> list[str]:
    notes = read_tokenizer(folder, {}, quirks=quirks).notes
    return [note for note in notes if "has merges and no scores" not in note]


# What is changed -> what the note says, and a text of other ids.
LOST: dict[str, tuple[dict[str, Any], str, str]] = {
    "NFKC": (
        normalizer({"type": "NFKC"}, PREFIX, SPACE),
        "normalizer NFKC is not applied: llama.cpp takes 'ﬁ' as it is, not as 'fi'", "ﬁ",
    ),
    "Lowercase": (normalizer(PREFIX, SPACE, {"type": "Lowercase"}), "takes 'Ａ' as it is, not as 'ａ'", "A"),
    "Strip": (
        normalizer({"type": "Strip", "strip_left": True, "strip_right": True}, PREFIX, SPACE),
        "normalizer Strip is not applied: llama.cpp takes ' a  b ' as it is, not as 'a  b'", "a ",
    ),
    "another Replace": (
        normalizer({"type": "Replace", "pattern": {"String": "b"}, "content": "a"}, PREFIX, SPACE),
        "normalizer Replace is not applied: llama.cpp takes 'b' as it is, not as 'a'", "b",
    ),
    "runs of spaces": (
        normalizer({"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "}, PREFIX, SPACE),
        "takes ' a  b ' as it is, not as ' a b '", "a  b",
    ),
    "no ▁ for a space": (normalizer(PREFIX), "tokenizer.json makes '▁a b' of 'a b', llama.cpp '▁a▁b'", "a b"),
    "another character for it": (
        metaspace(replacement="_"), "tokenizer.json makes '_a_b' of 'a b', llama.cpp 'a▁b'", "a b",
    ),
    "no second space": (metaspace(), "tokenizer.json makes '▁a' of ' a', llama.cpp '▁▁a'", " a"),
    "Digits": (
        {"pre_tokenizer": {"type": "Digits", "individual_digits": True}},
        "pre_tokenizer Digits cuts the token '11'; llama.cpp doesn't", "11",
    ),
    "Metaspace that cuts": (
        {**metaspace("never", split=True)}, "pre_tokenizer Metaspace cuts the token '▁▁'", "  ",
    ),
}  # fmt: skip


@pytest.mark.parametrize("quirks", [NO_QUIRKS, LLAMA], ids=["any", "Llama"])
@pytest.mark.parametrize(("changes", "says", "text"), LOST.values(), ids=LOST.keys())
def test_what_is_lost_is_named(
    changes: dict[str, Any], says: str, text: str, quirks: Quirks, tmp_path: Path
) -> None:
    cuts = "pre_tokenizer" in changes and "cuts" in says
    put_pieces(tmp_path, *(["1", "11", "▁▁"] if cuts else []), **changes)
    (note,) = lost(tmp_path, quirks)
    assert says in note
    if oracle.available():
        assert not same_ids(tmp_path, text, read_tokenizer(tmp_path, {}, quirks=quirks))


def same_ids(folder: Path, text: str, tokenizer: Tokenizer) -> bool:
    from tokenizers import Tokenizer as LibraryTokenizer

    library = LibraryTokenizer.from_file(str(folder / "tokenizer.json"))
    with oracle.Model(write_vocab_file(folder / "vocab.gguf", tokenizer), vocab_only=True) as model:
        found = model.tokenize(text, parse_special=True)
    return found == library.encode(text, add_special_tokens=False).ids


USUAL: dict[str, tuple[dict[str, Any], bool | None]] = {
    "Llama's": ({}, None),
    "Gemma's": (
        {"normalizer": SPACE, "pre_tokenizer": {"type": "Split", "pattern": {"String": " "},
                                                "behavior": "MergedWithPrevious", "invert": False}},
        False,
    ),
    "a space without a prefix": (metaspace("never"), False),
    "by a regex": (normalizer(PREFIX, {**SPACE, "pattern": {"Regex": " "}}), None),
}  # fmt: skip


@pytest.mark.parametrize(("changes", "prefix"), USUAL.values(), ids=USUAL.keys())
def test_the_usual_steps_are_used(changes: dict[str, Any], prefix: bool | None, tmp_path: Path) -> None:
    put_pieces(tmp_path, "▁▁", **changes)
    tokenizer = read_tokenizer(tmp_path, {})
    assert lost(tmp_path) == []
    assert tokenizer.add_space_prefix is prefix
    if oracle.available():
        for text in ("a b", " a", "a  b ", "é</s>a"):
            assert same_ids(tmp_path, text, tokenizer)


def test_an_expression_that_takes_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline_notes, "PATIENCE_SECONDS", 0.0)
    split = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
    (note,) = lost(put_pieces(tmp_path, "▁▁", pre_tokenizer=split))
    assert note == "pre_tokenizer Split is too slow to be tried, and not applied"


def test_a_space_before_a_text_alone(tmp_path: Path) -> None:
    first, second = lost(put_pieces(tmp_path, **metaspace("first")))
    assert "of ' a', llama.cpp '▁▁a'" in first
    assert "puts one before a text, llama.cpp behind special tokens, too" in second


def test_a_stated_prefix_is_what_the_pipeline_is_compared_with(tmp_path: Path) -> None:
    put_pieces(tmp_path, **normalizer(SPACE))
    put(tmp_path, tokenizer_config_json={"add_prefix_space": True, "eos_token": "</s>", "bos_token": "<s>"})
    (note,) = lost(tmp_path, LLAMA)
    assert "tokenizer.json makes 'a▁b' of 'a b', llama.cpp '▁a▁b'" in note


def test_bytes_without_tokens(tmp_path: Path) -> None:
    tokens = {token: i for i, token in enumerate([*PIECES[:100], "▁", "a"])}
    put_pieces(tmp_path, model={"vocab": tokens})
    (note,) = lost(tmp_path)
    assert "159 of the 256 bytes have no token: llama.cpp stops with an error" in note


@pytest.mark.parametrize("key", ["continuing_subword_prefix", "end_of_word_suffix"])
def test_marks_of_words_are_refused(key: str, tmp_path: Path) -> None:
    put_pieces(tmp_path, model={key: "@@"})
    with pytest.raises(BadTokenizer, match=rf"model\.{key} is '@@'; llama\.cpp's BPE has none"):
        read_tokenizer(tmp_path, {})


COMMON: dict[str, tuple[dict[str, Any], str]] = {
    "truncation": (
        {"truncation": {"direction": "Right", "max_length": 512, "strategy": "LongestFirst", "stride": 0}},
        "truncation to 512 tokens is not applied",
    ),
    "padding": (
        {"padding": {"strategy": {"Fixed": 8}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0,
                     "pad_type_id": 0, "pad_token": "a"}},
        "padding is not applied",
    ),
    "decoder": (
        {"decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True}},
        "decoder WordPiece is not applied",
    ),
    "post-processor": (
        {"post_processor": {"type": "BertProcessing", "sep": ["</s>", 7], "cls": ["<s>", 6]}},
        "tokenizer.json puts '<s>' before and '</s>' behind a text: left out",
    ),
    "a second token before a text": (
        {"post_processor": template(["<s>", "</s>", "A"], ["A", "B"])}, "puts '</s>' beside a text",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", ["bytes", "pieces"])
@pytest.mark.parametrize(("changes", "says"), COMMON.values(), ids=COMMON.keys())
def test_what_no_tokenizer_of_llama_cpp_does(
    changes: dict[str, Any], says: str, kind: str, tmp_path: Path
) -> None:
    if kind == "bytes":
        put(
            tmp_path,
            tokenizer_json=small(**changes),
            tokenizer_config_json={"bos_token": "<s>", "eos_token": "</s>"},
        )
    else:
        put_pieces(tmp_path, **changes)
    (note,) = lost(tmp_path)
    assert says in note


def test_padding_to_the_longest_text_changes_none(tmp_path: Path) -> None:
    padding = {**COMMON["padding"][0]["padding"], "strategy": "BatchLongest"}
    assert lost(put_pieces(tmp_path, padding=padding)) == []


def test_dropout(tmp_path: Path) -> None:
    for content in (with_model(dropout=0.1), with_model(dropout=0.0)):
        put(tmp_path, tokenizer_json=content)
        noted = [note for note in read(tmp_path).notes if "dropout 0.1 is not applied" in note]
        assert len(noted) == bool(content["model"]["dropout"])


def test_bytes_that_llama_cpp_leaves_out(tmp_path: Path) -> None:
    vocab = {**small()["model"]["vocab"], "<unk>": 6}
    content = with_model(vocab=vocab, unk_token="<unk>")
    put(tmp_path, tokenizer_json={**content, "added_tokens": []})
    assert [note for note in read(tmp_path).notes if "239 bytes have no token" in note]
    put(tmp_path, tokenizer_json=small())
    assert not [note for note in read(tmp_path).notes if "have no token" in note]


def test_gemma_4(tmp_path: Path) -> None:
    write_gemma_tokenizer(tmp_path)
    assert lost(tmp_path, GEMMA_4) == []
    put_pieces(tmp_path, "▁▁", model={"ignore_merges": True}, **metaspace(split=True))
    spaces, cut, merges = lost(tmp_path, GEMMA_4)
    assert "makes '▁a▁b' of 'a b', llama.cpp 'a▁b'" in spaces
    assert "pre_tokenizer Metaspace cuts the token '▁▁'" in cut
    assert "ignore_merges is true" in merges
