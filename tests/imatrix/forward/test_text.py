"""Text as chunks of token ids.

SentencePiece tokens: llama.cpp's own, from what a GGUF file says, for any vocabulary and text.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from convert.tokenizer.tokenizer import read_tokenizer
from convert.tokenizer.vocab import TokenType
from gguf_tools import FileLayout
from gguf_tools.errors import BadRequest, BadTokenizer
from gguf_tools.format.values import Metadata, Value
from imatrix.texts.sentence_pieces import SentencePieces
from imatrix.texts.tokens import Cut, bos_of, cut_into_chunks, make_encoder
from tests.convert.tokenizer.small_tokenizers import TEXT, read, write_vocab_file
from tests.convert.tokenizer.test_vocab_spm import train_spm
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
        ([5, 6, 7, 8], Cut(4, from_chunk=1), "1 chunks of 4 tokens, and from_chunk=1"),
    ],
)
def test_what_makes_no_chunks(ids: list[int], cut: Cut, message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        cut_into_chunks(ids, None, 32, cut, "t.txt")


def test_a_bos_outside_of_the_vocabulary() -> None:
    with pytest.raises(BadRequest, match="token 40 is outside of the vocabulary of 32"):
        cut_into_chunks([5, 6, 7, 8], 40, 32, Cut(2, from_chunk=1), "t.txt")


def test_tokenizers_that_are_not_read() -> None:
    with pytest.raises(BadTokenizer, match="'rwkv', expected 'llama'"):
        make_encoder({"tokenizer.ggml.model": Value.string("rwkv")})
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


needs_llama_cpp = pytest.mark.skipif(not oracle.available(), reason="needs the xllamacpp wheel")

NORMAL, USER = TokenType.NORMAL, TokenType.USER_DEFINED
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def vocab_of(
    pieces: list[tuple[str, float, TokenType]], *, add_space_prefix: bool | None = None
) -> dict[str, Value]:
    """The metadata of a file with <unk>, <s>, </s>, the bytes, and `pieces` of (text, score, type)."""
    first = [("<unk>", TokenType.UNKNOWN), ("<s>", TokenType.CONTROL), ("</s>", TokenType.CONTROL)]
    metadata = {
        "general.architecture": Value.string("deepseek2"),
        "tokenizer.ggml.model": Value.string("llama"),
        "tokenizer.ggml.tokens": Value.strings([text for text, _ in first] + BYTES + [p[0] for p in pieces]),
        "tokenizer.ggml.scores": Value.f32s([0.0] * (3 + len(BYTES)) + [p[1] for p in pieces]),
        "tokenizer.ggml.token_type": Value.i32s(
            [kind for _, kind in first] + [TokenType.BYTE] * len(BYTES) + [p[2] for p in pieces]
        ),
    }
    if add_space_prefix is not None:
        metadata["tokenizer.ggml.add_space_prefix"] = Value.bool_(add_space_prefix)
    return metadata


def llama_cpps(vocab: Metadata, path: Path, text: str, *, parse_special: bool = False) -> list[int]:
    path.write_bytes(FileLayout.of(vocab, ()).header)
    with oracle.Model(path, vocab_only=True) as model:
        return model.tokenize(text, parse_special=parse_special)


@needs_llama_cpp
@pytest.mark.parametrize("parse_special", [False, True])
@pytest.mark.parametrize("leading_space", [True, False])
def test_tokens_of_a_trained_model(leading_space: bool, parse_special: bool, tmp_path: Path) -> None:
    tokenizer = read(train_spm(tmp_path, add_dummy_prefix=leading_space), 448, bos_token_id=1, eos_token_id=2)
    pieces = SentencePieces(tokenizer.metadata(), parse_special=parse_special)
    with oracle.Model(write_vocab_file(tmp_path / "vocab.gguf", tokenizer), vocab_only=True) as model:
        for text in (TEXT * 3, *TEXT.splitlines(keepends=True), "", " ", "▁", "a<s>b</s><s> c<unk>"):
            assert pieces.encode(text) == model.tokenize(text, parse_special=parse_special), text


@needs_llama_cpp
@pytest.mark.parametrize("parse_special", [False, True])
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    pieces=st.lists(
        st.tuples(
            st.text("ab▁ é日", min_size=1, max_size=5).filter(lambda text: text != "▁"),
            st.sampled_from([0.0, -1.0, -2.0, -1000.0]),
            st.sampled_from([*[NORMAL] * 5, *(kind for kind in TokenType if kind is not TokenType.BYTE)]),
        ),
        max_size=24, unique_by=lambda piece: piece[0],
    ),
    text=st.text("ab▁ é日<s>\n", max_size=40),
    add_space_prefix=st.sampled_from([None, True, False]),
)  # fmt: skip
def test_tokens_of_any_vocabulary(
    parse_special: bool, pieces: list[tuple[str, float, TokenType]], text: str,
    add_space_prefix: bool | None, tmp_path: Path,
) -> None:  # fmt: skip
    vocab = vocab_of([("▁", -3.0, NORMAL), *pieces], add_space_prefix=add_space_prefix)
    expected = llama_cpps(vocab, tmp_path / "v.gguf", text, parse_special=parse_special)
    assert SentencePieces(vocab, parse_special=parse_special).encode(text) == expected


@pytest.mark.parametrize(
    ("pieces", "text", "expected"),
    [
        ([("ab", -1.0, NORMAL), ("bc", 0.0, NORMAL)], "abc", ["<0x61>", "bc"]),  # the higher score first
        ([("ab", -1.0, NORMAL), ("bc", -1.0, NORMAL)], "abc", ["ab", "<0x63>"]),  # the left one of equals
        ([("aa", 0.0, NORMAL)], "aaaaa", ["aa", "aa", "<0x61>"]),
        ([("abc", 0.0, NORMAL)], "abc", ["<0x61>", "<0x62>", "<0x63>"]),  # no way to it by pairs
        ([("a b", 0.0, USER)], "a bb ", ["a b", "<0x62>", "<0xE2>", "<0x96>", "<0x81>"]),
        ([("日", 0.0, NORMAL)], "日本", ["日", "<0xE6>", "<0x9C>", "<0xAC>"]),
    ],
)  # fmt: skip
def test_pairs_are_joined_by_score(
    pieces: list[tuple[str, float, TokenType]], text: str, expected: list[str]
) -> None:
    vocab = vocab_of(pieces, add_space_prefix=False)
    tokens = vocab["tokenizer.ggml.tokens"].data
    assert [tokens[number] for number in SentencePieces(vocab).encode(text)] == expected


def test_a_byte_without_a_token() -> None:
    vocab = {"tokenizer.ggml.tokens": Value.strings(["▁", "a", b"\xc3"])}
    assert SentencePieces(vocab).encode("a") == [0, 1]
    with pytest.raises(BadTokenizer, match="no token for byte 0xA9"):
        SentencePieces(vocab).encode("é")


def test_lists_of_different_lengths() -> None:
    vocab = vocab_of([]) | {"tokenizer.ggml.scores": Value.f32s([0.0])}
    with pytest.raises(BadTokenizer, match="scores has 1 items for 259 tokens"):
        SentencePieces(vocab)


def test_a_long_text_without_a_seam_is_done_in_time() -> None:
    vocab = vocab_of([("a" * length, -float(length), NORMAL) for length in (2, 4, 8)], add_space_prefix=False)
    assert len(SentencePieces(vocab).encode("a" * 200_000)) == 25_000
