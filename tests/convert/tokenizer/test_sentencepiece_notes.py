"""What llama.cpp does otherwise than a tokenizer.model says: a note, with a text that it cuts otherwise."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from convert.tokenizer.sentencepiece_model import Normalizer, read_sentencepiece_model
from convert.tokenizer.sentencepiece_notes import model_notes
from convert.tokenizer.tokenizer import read_tokenizer
from convert.tokenizer.vocab import TokenType
from gguf_tools.errors import BadTokenizer
from tests.convert.tokenizer.small_tokenizers import put, read, write_vocab_file
from tests.convert.tokenizer.test_vocab_spm import train_spm
from tests.support import oracle

RULES = {"normalization_rule_name": "nmt_nfkc"}
# Settings of the trainer -> what the note says, and the text that it gives as an example.
CASES: dict[str, tuple[dict[str, Any], str, str]] = {
    "nmt_nfkc": (RULES, "normalizer nmt_nfkc is not applied: llama.cpp takes 'ﬁ' as it is, not as 'fi'", "ﬁ"),
    "nfkc": ({"normalization_rule_name": "nfkc"}, "normalizer nfkc is not applied", "ﬁ"),
    "case folding": ({"normalization_rule_name": "nmt_nfkc_cf"}, "normalizer nmt_nfkc_cf is not", "ﬁ"),
    "spaces": ({"remove_extra_whitespaces": True}, "remove_extra_whitespaces is not applied", " a  b "),
    "a space behind": (
        {"treat_whitespace_as_suffix": True}, "treat_whitespace_as_suffix makes 'a▁' of 'a'", "a",
    ),
    "user-defined": (
        {"user_defined_symbols": ["<x>", "<tool>"]},
        "the user-defined piece '<x>' and 1 more is not kept whole", "<x>",
    ),
}  # fmt: skip


def notes(folder: Path, **config: Any) -> list[str]:
    return [note for note in read(folder, **config).notes if note.startswith("tokenizer.model: ")]


@pytest.mark.parametrize(("settings", "says", "example"), CASES.values(), ids=CASES.keys())
def test_what_is_lost_is_named(settings: dict[str, Any], says: str, example: str, tmp_path: Path) -> None:
    (note,) = notes(train_spm(tmp_path, **settings))
    assert says in note
    if oracle.available():
        import sentencepiece

        library = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model"))
        vocab = write_vocab_file(tmp_path / "vocab.gguf", read(tmp_path))
        with oracle.Model(vocab, vocab_only=True) as model:
            assert model.tokenize(example) != library.encode(example)


def test_defaults_of_the_trainer_lose_two(tmp_path: Path) -> None:
    train_spm(tmp_path, normalization_rule_name="nmt_nfkc", remove_extra_whitespaces=True)
    assert len(notes(tmp_path)) == 2


@pytest.mark.parametrize(
    "settings",
    [{}, {"add_dummy_prefix": False}, {"treat_whitespace_as_suffix": True, "add_dummy_prefix": False},
     {"user_defined_symbols": ["to", "▁▁", "\n"]}],
)  # fmt: skip
def test_what_makes_no_difference_is_not_named(settings: dict[str, Any], tmp_path: Path) -> None:
    assert notes(train_spm(tmp_path, **settings)) == []


def test_user_defined_pieces_that_are_added_tokens(tmp_path: Path) -> None:
    """llama.cpp finds those before it cuts."""
    train_spm(tmp_path, user_defined_symbols=["<x>"])
    ids = {text: str(token_id) for token_id, text in enumerate(read(tmp_path).vocab.tokens)}
    entries = {ids["<x>"]: {"content": "<x>", "special": False}}
    put(tmp_path, tokenizer_config_json={"added_tokens_decoder": entries})
    assert notes(tmp_path) == []


def test_bytes_without_tokens(tmp_path: Path) -> None:
    (note,) = notes(train_spm(tmp_path, byte_fallback=False, vocab_size=150))
    assert "256 of the 256 bytes have no token: llama.cpp stops with an error" in note


def test_what_the_trainer_can_not_make(tmp_path: Path) -> None:
    path = train_spm(tmp_path) / "tokenizer.model"
    model, vocab = read_sentencepiece_model(path), read_tokenizer(tmp_path, {}).vocab
    assert list(model_notes(path, model, vocab)) == []
    normalizer = replace(model.normalizer, escapes_spaces=False)
    (note,) = model_notes(path, replace(model, normalizer=normalizer), vocab)
    assert "escape_whitespaces is false" in note

    train_spm(tmp_path, **RULES)
    table = read_sentencepiece_model(path).normalizer.charsmap
    (note,) = model_notes(path, replace(model, denormalizer=Normalizer("mine", table)), vocab)
    assert "denormalizer mine is not applied: llama.cpp prints 'ﬁ' as it is, not as 'fi'" in note
    with pytest.raises(BadTokenizer, match="the table of its normalizer can't be used"):
        list(model_notes(path, replace(model, normalizer=Normalizer("odd", b"abc")), vocab))

    numbered = enumerate(model.pieces)
    number, piece = next((n, p) for n, p in numbered if p.kind is TokenType.NORMAL and len(p.text) == 2)
    pieces = (*model.pieces[:number], replace(piece, kind=TokenType.UNUSED), *model.pieces[number + 1 :])
    types = (*vocab.types[:number], TokenType.UNUSED, *vocab.types[number + 1 :])
    (note,) = model_notes(path, replace(model, pieces=pieces), replace(vocab, types=types))
    assert f"the piece {piece.text!r} is unused; llama.cpp uses it all the same" in note
