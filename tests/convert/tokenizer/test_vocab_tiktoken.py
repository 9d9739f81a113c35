"""tiktoken.model of Kimi and hy.tiktoken of Hunyuan: tokens, merges, and what is wrong with a file."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pytest

from convert.architectures.hunyuan import FAMILIES
from convert.tokenizer.files import KIMI, Quirks, TokenizerFiles
from convert.tokenizer.tokenizer import read_tokenizer
from convert.tokenizer.vocab import ALPHABET, TokenType, Vocab, spelled
from convert.tokenizer.vocab_tiktoken import merges_of, read_tiktoken_vocab
from gguf_tools.errors import BadRequest, BadTokenizer
from tests.convert.tokenizer.small_tokenizers import put

BYTES = [bytes([byte]) for byte in range(256)]
TOKENS = [*BYTES, b"ab", b"bc", b"abc", b"xyz", b" a"]


def write(folder: Path, tokens: list[bytes], name: str = "tiktoken.model") -> Path:
    path = folder / name
    path.write_bytes(b"".join(b"%s %d\n" % (base64.b64encode(token), i) for i, token in enumerate(tokens)))
    return path


def files(folder: Path, vocab_size: int | None = None, **tokenizer_config: Any) -> TokenizerFiles:
    """Return the files of a folder, with tokenizer_config.json as given."""
    put(folder, tokenizer_config_json=tokenizer_config)
    return TokenizerFiles(folder, {"vocab_size": vocab_size})


def read(folder: Path, vocab_size: int | None = None, **config: Any) -> Vocab:
    return read_tiktoken_vocab(KIMI, write(folder, TOKENS), files(folder, vocab_size, **config))


def test_tokens_are_spelled_in_the_byte_alphabet(tmp_path: Path) -> None:
    assert len(set(ALPHABET)) == 256
    assert ALPHABET.isprintable()
    assert spelled("é a\n".encode()) == "Ã©ĠaĊ"
    assert read(tmp_path).tokens[256:261] == ("ab", "bc", "abc", "xyz", "Ġa")


def test_a_merge_is_what_remains_of_a_token_after_all_better_ones() -> None:
    # abc: ab is made before bc, so the pair is (ab, c). xyz has no parts of two bytes: three remain.
    assert merges_of(TOKENS) == ("a b", "b c", "ab c", "Ġ a")


def test_of_equal_ranks_the_first_pair_is_merged() -> None:
    assert merges_of([*BYTES, b"aa", b"aaa"]) == ("a a", "aa a")


def test_special_tokens_come_after_the_others(tmp_path: Path) -> None:
    named = {"261": {"content": "[BOS]"}, "263": {"content": "[EOS]"}}
    vocab = read(tmp_path, 261 + 256, added_tokens_decoder=named)
    assert vocab.tokens[261:265] == ("[BOS]", "<|reserved_token_262|>", "[EOS]", "<|reserved_token_264|>")
    assert vocab.tokens[-1] == "<|reserved_token_516|>"
    assert set(vocab.types[:261]) == {TokenType.NORMAL}
    assert set(vocab.types[261:]) == {TokenType.CONTROL}
    assert vocab.notes == ()


def test_rows_without_a_token_and_tokens_without_a_row(tmp_path: Path) -> None:
    vocab = read(tmp_path, 261 + KIMI.n_special + 2)
    assert vocab.tokens[-2:] == ("[PAD519]", "[PAD520]")
    assert vocab.types[-2:] == (TokenType.UNUSED, TokenType.UNUSED)
    assert vocab.notes == ("2 rows of the embedding have no token: written as [PADn]",)
    vocab = read(tmp_path, 262, added_tokens_decoder={"262": {"content": "[EOS]"}})
    assert len(vocab.tokens) == 262
    assert vocab.notes == ("tokenizer_config.json: token '[EOS]' has no row in the embedding: left out",)


def test_special_ids_are_config_json_s_alone(tmp_path: Path) -> None:
    write(tmp_path, TOKENS)
    (tmp_path / "tokenizer_config.json").write_text('{"unk_token": "ab", "bos_token": "ab"}')
    config = {"vocab_size": 261 + 256, "bos_token_id": 261}
    tokenizer = read_tokenizer(tmp_path, config, quirks=Quirks(tiktoken=KIMI))
    assert (tokenizer.model, tokenizer.pre) == ("gpt2", "kimi-k2")
    assert tokenizer.special.ids == {"bos": 261}


@pytest.mark.parametrize(("family", "bos", "begins"), [(0, "<|startoftext|>", 262), (1, "<|bos|>", 263)])
def test_a_hunyuan_has_five_named_special_tokens_and_extras(
    family: int, bos: str, begins: int, tmp_path: Path
) -> None:
    write(tmp_path, TOKENS, "hy.tiktoken")
    put(tmp_path, tokenizer_config_json={"tokenizer_class": "HYTokenizer", "pad_token": "<|pad|>"})
    config = {"vocab_size": 261 + 210 + 2, "bos_token_id": 1, "eos_token_id": 264, "pad_token_id": 265}
    tokenizer = read_tokenizer(tmp_path, config, quirks=FAMILIES[family].quirks)
    tokens = tokenizer.vocab.tokens
    assert tokens[260:268] == (
        "Ġa", "<|endoftext|>", "<|startoftext|>", "<|bos|>", "<|eos|>", "<|pad|>", "<|extra_0|>",
        "<|extra_1|>",
    )  # fmt: skip
    assert tokens[-3:] == ("<|extra_204|>", "[PAD471]", "[PAD472]")
    assert (tokenizer.pre, tokenizer.vocab.merges) == ("hunyuan", ("a b", "b c", "ab c", "Ġ a"))
    assert tokenizer.special.ids == {"bos": begins, "eos": 264, "pad": 265}
    assert f"a text begins with {bos} ({begins}); config.json says bos_token_id 1" in tokenizer.notes
    assert [note for note in tokenizer.notes if "normalizer NFC" in note]


def test_another_pre_tokenizer_can_t_be_asked_for(tmp_path: Path) -> None:
    write(tmp_path, TOKENS)
    with pytest.raises(BadRequest, match=r"pre_tokenizer qwen2: that of .*tiktoken\.model is kimi-k2"):
        read_tokenizer(tmp_path, {}, pre_tokenizer="qwen2", quirks=Quirks(tiktoken=KIMI))


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "no token for the byte 0x00"),
        (b"IQ==\n", r"line 1 is .*, expected BASE64 RANK"),
        (b"I*== 0\n", r"line 1 is .*, expected BASE64 RANK"),
        (b"IQ== 1\n", "line 1: token of 1 bytes and rank 1, expected rank 0"),
        (b" 0\n", r"line 1 is .*, expected BASE64 RANK"),
    ],
)
def test_a_damaged_file_is_refused(data: bytes, words: str, tmp_path: Path) -> None:
    path = tmp_path / "tiktoken.model"
    path.write_bytes(data)
    with pytest.raises(BadTokenizer, match=words) as caught:
        read_tiktoken_vocab(KIMI, path, files(tmp_path))
    assert "\n" not in str(caught.value)


def test_tokens_that_stand_twice_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadTokenizer, match="1 tokens appear twice"):
        read_tiktoken_vocab(KIMI, write(tmp_path, [*BYTES, b"a"]), files(tmp_path))


def test_another_program_s_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        BadTokenizer, match="tokenizer_class is 'QWenTokenizer', expected 'TikTokenTokenizer'"
    ):
        read(tmp_path, tokenizer_class="QWenTokenizer")


def test_names_of_ordinary_tokens_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadTokenizer, match=r"'\[BOS\]' has id 5, expected 261 or more"):
        read(tmp_path, added_tokens_decoder={"5": {"content": "[BOS]"}})


def test_too_few_rows_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadTokenizer, match=r"261 tokens, but config\.json says vocab_size 260"):
        read(tmp_path, 260)
