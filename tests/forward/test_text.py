"""Text as chunks of token ids."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from convert.tokenizer.tokenizer import read_tokenizer
from forward.text.tokens import Cut, bos_of, cut_into_chunks, make_encoder
from gguf_tools.errors import BadRequest, BadTokenizer
from gguf_tools.format.values import Value
from tests.convert.tokenizer.small_tokenizers import TEXT, write_vocab_file
from tests.support import oracle
from tests.support.tokenizer_files import NAMES, VOCAB_SIZES, copy_tokenizer

SPECIAL = TEXT + "<｜User｜>Hello<｜Assistant｜>, <｜end▁of▁sentence｜>!"


@pytest.mark.skipif(not oracle.available(), reason="needs the xllamacpp wheel")
@pytest.mark.parametrize("name", NAMES)
def test_tokens_are_llama_cpps(name: str, tmp_path: Path) -> None:
    tokenizer = read_tokenizer(copy_tokenizer(name, tmp_path), {"vocab_size": VOCAB_SIZES[name]})
    with oracle.Model(write_vocab_file(tmp_path / "vocab.gguf", tokenizer), vocab_only=True) as model:
        for parse_special in (False, True):
            encoder = make_encoder(tokenizer.metadata(), parse_special=parse_special)
            assert encoder.encode(SPECIAL) == model.tokenize(SPECIAL, parse_special=parse_special)


def test_chunks_begin_with_bos() -> None:
    text = cut_into_chunks(list(range(10, 21)), 1, 32, Cut(chunk_size=4), "t.txt")
    assert text.tokens.tolist() == [[1, 10, 11, 12], [13, 14, 15, 16], [17, 18, 19, 20]]
    assert text.inputs.tolist() == [[1, 10, 11, 12], [1, 14, 15, 16], [1, 18, 19, 20]]


def test_without_bos_tokens_stay_as_they_are() -> None:
    text = cut_into_chunks(list(range(10, 21)), None, 32, Cut(4, from_chunk=1, n_chunks=5), "t.txt")
    assert np.array_equal(text.tokens, text.inputs)
    assert text.tokens.tolist() == [[14, 15, 16, 17]]


@pytest.mark.parametrize(
    ("ids", "cut", "message"),
    [
        ([5, 6], Cut(4), "2 tokens, expected a chunk of 4 or more"),
        ([5, 99, 6, 7], Cut(4), "token 99 is outside of the vocabulary of 32"),
        ([5, 6, 7, 8], Cut(4, from_chunk=1), "1 chunks of 4 tokens, and --from-chunk 1"),
        ([5, 6, 7, 8], Cut(4, n_chunks=0), "no chunk"),
    ],
)
def test_what_makes_no_chunks(ids: list[int], cut: Cut, message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        cut_into_chunks(ids, None, 32, cut, "t.txt")


def test_a_bos_outside_of_the_vocabulary() -> None:
    with pytest.raises(BadRequest, match="token 40 is outside of the vocabulary of 32"):
        cut_into_chunks([5, 6, 7, 8], 40, 32, Cut(2, from_chunk=1), "t.txt")


def test_tokenizers_that_are_not_read() -> None:
    with pytest.raises(BadTokenizer, match="'bert', expected 'gpt2'"):
        make_encoder({"tokenizer.ggml.model": Value.string("bert")})
    with pytest.raises(BadTokenizer, match="'bloom', expected one of deepseek-llm"):
        make_encoder(
            {"tokenizer.ggml.model": Value.string("gpt2"), "tokenizer.ggml.pre": Value.string("bloom")}
        )
    with pytest.raises(BadTokenizer, match="there is no"):
        bos_of({"tokenizer.ggml.add_bos_token": Value.bool_(True)})


@pytest.mark.parametrize(
    ("vocab", "bos"),
    [
        ({"model": Value.string("gpt2"), "bos_token_id": Value.u32(7)}, None),
        ({"model": Value.string("llama")}, 1),
        ({"model": Value.string("llama"), "bos_token_id": Value.u32(7)}, 7),
        ({"model": Value.string("llama"), "add_bos_token": Value.bool_(False)}, None),
    ],
)
def test_bos_that_a_file_does_not_speak_of(vocab: dict[str, Value], bos: int | None) -> None:
    assert bos_of({f"tokenizer.ggml.{key}": value for key, value in vocab.items()}) == bos
