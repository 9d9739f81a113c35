"""Tokens of a SentencePiece model in a tokenizer.json, and other quirks of Llama's tokenizers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from convert.architectures import families
from convert.architectures.base import Architecture
from convert.tokenizer.files import LLAMA, Quirks
from convert.tokenizer.tokenizer import Tokenizer, read_tokenizer
from gguf_tools.errors import BadTokenizer
from gguf_tools.format import keys

BYTES = [f"<0x{byte:02X}>" for byte in range(4)]
TOKENS = ["<unk>", "<s>", "</s>", *BYTES, "▁", "a", "▁a"]


def added(token_id: int, text: str, special: bool) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": token_id, "content": text, "special": special, **flags}


def write(folder: Path, **config: Any) -> Path:
    """Write a small tokenizer.json of SentencePiece's tokens, and a tokenizer_config.json."""
    model = {
        "type": "BPE", "byte_fallback": True, "unk_token": "<unk>", "merges": ["▁ a"],
        "vocab": {text: token_id for token_id, text in enumerate(TOKENS)},
    }  # fmt: skip
    tokens = [added(i, text, True) for i, text in enumerate(TOKENS[:3])]
    tokens += [added(10, "<tool>", False), added(11, "<pad>", True)]
    content = {"version": "1.0", "added_tokens": tokens, "model": model}
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
    (folder / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps({**names, **config}), encoding="utf-8")
    return folder


def read(folder: Path, quirks: Quirks = LLAMA, **config: Any) -> Tokenizer:
    return read_tokenizer(folder, config, quirks=quirks)


def test_types_scores_and_padding(tmp_path: Path) -> None:
    tokenizer = read(write(tmp_path), vocab_size=14)
    assert (tokenizer.model, tokenizer.pre) == ("llama", "default")
    assert tokenizer.vocab.tokens == (*TOKENS, "<tool>", "<pad>", "[PAD12]", "[PAD13]")
    assert [int(kind) for kind in tokenizer.vocab.types] == [3, 3, 3, 6, 6, 6, 6, 1, 1, 1, 4, 3, 5, 5]
    assert tokenizer.vocab.scores == (-1000.0,) * 12 + (-10000.0,) * 2
    assert tokenizer.special.ids == {"bos": 1, "eos": 2, "unk": 0, "pad": 11}
    assert [note for note in tokenizer.notes if "has merges and no scores" in note]


@pytest.mark.parametrize("family", families(), ids=lambda family: family.hf_names[0])
def test_every_family_reads_it(family: Architecture, tmp_path: Path) -> None:
    quirks = family.quirks
    tokenizer = read(write(tmp_path), quirks)
    has_merges = quirks.merged_pieces is not None
    assert tokenizer.model == ("gemma4" if has_merges else "llama")
    noted = [note for note in tokenizer.notes if "has merges and no scores" in note]
    assert len(noted) == (0 if has_merges else 1)


def test_a_token_without_a_row(tmp_path: Path) -> None:
    with pytest.raises(BadTokenizer, match=r"token '<pad>' has id 11, but config\.json says vocab_size 11"):
        read(write(tmp_path), vocab_size=11)


@pytest.mark.parametrize("stated", [True, False])
def test_a_stated_prefix_is_written(stated: bool, tmp_path: Path) -> None:
    metadata = read(write(tmp_path, add_prefix_space=stated)).metadata()
    assert metadata[keys.TOKENIZER_ADD_PREFIX].data is stated


def test_a_vocabulary_known_by_its_size(tmp_path: Path) -> None:
    folder = write(tmp_path, add_bos_token=True)
    code_llama = read(folder, vocab_size=32016).metadata()
    ids = [code_llama[f"tokenizer.ggml.{kind}_token_id"].data for kind in ("prefix", "suffix", "middle")]
    assert ids == [32007, 32008, 32009]
    assert code_llama[keys.TOKENIZER_EOT_ID].data == 32010
    assert read(folder, vocab_size=49152).metadata()[keys.TOKENIZER_ADD_BOS].data is False
    assert keys.TOKENIZER_PREFIX_ID not in read(folder, vocab_size=32000).metadata()
