"""SentencePiece vocabularies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from convert.tokenizer.tokenizer import read_tokenizer
from convert.tokenizer.vocab import TokenType
from gguf_tools.errors import BadRequest, BadTokenizer
from tests.convert.tokenizer.small_tokenizers import (
    TEXT,
    added,
    put,
    read,
    small,
    with_model,
    write_vocab_file,
)
from tests.support import oracle

needs_llama_cpp = pytest.mark.skipif(not oracle.available(), reason="the xllamacpp wheel is not installed")

CONTROL, USER_DEFINED, UNUSED, BYTE = (
    TokenType.CONTROL, TokenType.USER_DEFINED, TokenType.UNUSED, TokenType.BYTE,
)  # fmt: skip

TRAINED_ON = """\
The converter reads the tokenizer of a model and writes it into the file, token by token.
A token has a text, a type and a score; the scores say which pair of pieces is joined first.
def tokenizer(text: str) -> list[int]:
    return [token for token in pieces(text) if token not in {0, 1, 2, 345, 6789}]
Whether   the   spaces    stay, and what becomes of them (leading, trailing), is for the test to see!
"""


def train_spm(folder: Path, **options: Any) -> Path:
    """Write a tokenizer.model of 420 pieces with the settings of Llama's, trained on TRAINED_ON."""
    import sentencepiece

    settings = {
        "model_type": "bpe", "vocab_size": 420, "byte_fallback": True, "split_digits": True,
        "normalization_rule_name": "identity", "remove_extra_whitespaces": False,
        "allow_whitespace_only_pieces": True, "character_coverage": 0.98, "num_threads": 1,
        "minloglevel": 2, "hard_vocab_limit": False,
    }  # fmt: skip
    with (folder / "tokenizer.model").open("wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(TRAINED_ON.splitlines() * 3), model_writer=file, **{**settings, **options}
        )
    return folder


def test_sentencepiece_vocabulary(tmp_path: Path) -> None:
    import sentencepiece

    model = sentencepiece.SentencePieceProcessor(model_file=str(train_spm(tmp_path) / "tokenizer.model"))
    n_pieces = model.vocab_size()
    config = {"added_tokens_decoder": {
        "0": {"content": "<unk>", "special": True},
        str(n_pieces + 1): {"content": "<|turn|>", "special": False},
        str(n_pieces + 2): {"content": "two▁words", "special": False},
    }}  # fmt: skip
    put(tmp_path, tokenizer_config_json=config, added_tokens_json={"<more>": n_pieces})
    tokenizer = read(tmp_path, n_pieces + 4)

    assert (tokenizer.model, tokenizer.pre, tokenizer.add_space_prefix) == ("llama", "default", None)
    assert tokenizer.vocab.tokens[:4] == ("<unk>", "<s>", "</s>", "<0x00>")
    assert tokenizer.vocab.types[:4] == (CONTROL, CONTROL, CONTROL, BYTE)
    assert tokenizer.vocab.tokens[259:n_pieces] == tuple(map(model.id_to_piece, range(259, n_pieces)))
    assert tokenizer.vocab.tokens[n_pieces:] == ("<more>", "<|turn|>", "two words", f"[PAD{n_pieces + 3}]")
    assert tokenizer.vocab.types[n_pieces:] == (USER_DEFINED, CONTROL, USER_DEFINED, UNUSED)
    scores = tokenizer.vocab.scores
    assert scores is not None
    assert scores[259:n_pieces] == tuple(map(model.get_score, range(259, n_pieces)))
    assert scores[n_pieces:] == (-1000.0, -1000.0, -1000.0, -10000.0)
    assert tokenizer.special.ids == {"bos": 1, "eos": 2, "unk": 0}
    keys = [key.removeprefix("tokenizer.ggml.") for key in tokenizer.metadata()]
    assert keys[:5] == ["model", "pre", "tokens", "scores", "token_type"]
    assert "merges" not in keys


@needs_llama_cpp
@pytest.mark.parametrize("leading_space", [True, False])
def test_sentencepiece_ids(leading_space: bool, tmp_path: Path) -> None:
    import sentencepiece

    train_spm(tmp_path, add_dummy_prefix=leading_space)
    tokenizer = read(tmp_path, 448, bos_token_id=1, eos_token_id=2)
    assert tokenizer.add_space_prefix == (None if leading_space else False)
    library = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model"))
    with oracle.Model(write_vocab_file(tmp_path / "vocab.gguf", tokenizer), vocab_only=True) as model:
        for text in (TEXT, *TEXT.splitlines(keepends=True), " x", "日本"):
            assert model.tokenize(text) == library.encode(text), text


def test_sentencepiece_of_another_kind(tmp_path: Path) -> None:
    train_spm(tmp_path, model_type="unigram")
    with pytest.raises(BadTokenizer, match=r"tokenizer\.model: a SentencePiece model of type unigram"):
        read(tmp_path)


def test_sentencepiece_errors(tmp_path: Path) -> None:
    put(tmp_path, tokenizer_model="no protocol buffer")
    with pytest.raises(BadTokenizer, match=r"tokenizer\.model: not a SentencePiece model"):
        read(tmp_path)
    train_spm(tmp_path)
    with pytest.raises(BadTokenizer, match=r"has id 300, but config\.json says vocab_size 300"):
        read(tmp_path, 300)
    with pytest.raises(BadRequest, match=r"pre_tokenizer deepseek-v3: .*\(SentencePiece\) has none"):
        read_tokenizer(tmp_path, {}, pre_tokenizer="deepseek-v3")
    put(tmp_path, added_tokens_json={"<x>": 440, "<y>": 440})
    with pytest.raises(
        BadTokenizer, match=r"added_tokens\.json: tokens '<x>' and '<y>' have the same id 440"
    ):
        read(tmp_path, 448)


def test_byte_level_json_is_preferred_to_a_model_file(tmp_path: Path) -> None:
    put(train_spm(tmp_path), tokenizer_json=small())
    assert read(tmp_path).model == "gpt2"
    put(tmp_path, tokenizer_json=with_model(byte_fallback=True))
    assert read(tmp_path).model == "llama"


def pieces_as_json(folder: Path) -> dict[str, Any]:
    """The pieces of a tokenizer.model as a tokenizer.json."""
    ids = {text: token_id for token_id, text in enumerate(read(folder).vocab.tokens)}
    model = {"type": "BPE", "byte_fallback": True, "vocab": ids, "merges": []}
    return {"version": "1.0", "added_tokens": [], "model": model}


def test_a_tokenizer_json_beside_it_that_disagrees(tmp_path: Path) -> None:
    train_spm(tmp_path)
    alike = pieces_as_json(tmp_path)
    n_pieces = len(alike["model"]["vocab"])
    listed = {str(n_pieces): {"content": "<x>", "special": True}}
    put(tmp_path, tokenizer_config_json={"added_tokens_decoder": listed})
    known, unknown = added(n_pieces, "<x>"), added(n_pieces + 1, "<y>")

    def notes(content: dict[str, Any]) -> list[str]:
        put(tmp_path, tokenizer_json=content)
        return [note for note in read(tmp_path, n_pieces + 2).notes if note.startswith("tokenizer.json")]

    assert notes({**alike, "added_tokens": [known]}) == []
    assert notes({**alike, "added_tokens": [known, unknown]}) == [
        "tokenizer.json: added token '<y>' is not in tokenizer.model or beside it: left out"
    ]
    model = {**alike["model"], "vocab": {**alike["model"]["vocab"], "moreover": n_pieces}}
    assert notes({**alike, "model": model}) == [
        f"tokenizer.json has {n_pieces + 1} tokens and tokenizer.model {n_pieces}, {n_pieces} of them alike:"
        " tokenizer.model is used"
    ]
