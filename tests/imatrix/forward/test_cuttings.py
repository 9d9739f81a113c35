"""Every name of tokenizer.ggml.pre: ids as llama.cpp's own, on a vocabulary that shows each cut."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer

from convert.tokenizer.cuttings import CUTTINGS
from convert.tokenizer.vocab import TokenType
from gguf_tools import FileLayout
from gguf_tools.errors import BadTokenizer
from gguf_tools.format.values import Metadata, Value
from imatrix.texts.tokens import bos_of, make_encoder
from tests.imatrix.forward.hostile_text import HOSTILE
from tests.support import oracle

needs_llama_cpp = pytest.mark.skipif(not oracle.available(), reason="needs the xllamacpp wheel")
WORDS = ("Hello", "Ġleading", "日本語", "ĠCamelCase", "123")
"""Words that are tokens without merges: what ignores merges finds them."""


SENTENCEPIECE_BYTES = tuple(f"<0x{byte:02X}>" for byte in range(256))
LINES = "\n".join(HOSTILE)
CONTROL, USER_DEFINED = "<s>", "tis o"


@cache
def vocabulary(*, byte_level: bool) -> Metadata:
    """A BPE trained on each hostile line as one word, so that nearly every cut forbids a merge.

    byte_level  tokens spell bytes; else they are UTF-8, with ▁ for a space and no line end inside
    """
    library = Tokenizer(BPE())
    alphabet = ByteLevel.alphabet() if byte_level else []
    lines: Iterable[str] = HOSTILE
    if byte_level:
        library.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    else:
        lines = [part.replace(" ", "▁") for line in HOSTILE for part in re.findall(r"[^\n]+", line)]
    trainer = BpeTrainer(vocab_size=3000, min_frequency=1, initial_alphabet=alphabet, show_progress=False)
    library.train_from_iterator(lines, trainer)
    ids = library.get_vocab()
    extra = (*(() if byte_level else SENTENCEPIECE_BYTES), *WORDS, "\n\n", CONTROL, USER_DEFINED)
    tokens = list(dict.fromkeys((*sorted(ids, key=ids.__getitem__), *extra)))
    kinds = {CONTROL: TokenType.CONTROL, USER_DEFINED: TokenType.USER_DEFINED}
    return {
        "general.architecture": Value.string("llama"),
        "tokenizer.ggml.tokens": Value.strings(tokens),
        "tokenizer.ggml.token_type": Value.i32s([kinds.get(token, TokenType.NORMAL) for token in tokens]),
        "tokenizer.ggml.merges": Value.strings(
            [" ".join(pair) for pair in json.loads(library.to_str())["model"]["merges"]]
        ),
        "tokenizer.ggml.bos_token_id": Value.u32(tokens.index(CONTROL)),
        "tokenizer.ggml.eos_token_id": Value.u32(tokens.index(CONTROL)),
    }


def keys_of(name: str) -> Metadata:
    """The keys tokenizer.* of a file with this pre-tokenizer."""
    cutting = CUTTINGS[name]
    model = "whitespace" if cutting.drops_spaces else "gpt2"
    pre = {"tokenizer.ggml.model": Value.string(model), "tokenizer.ggml.pre": Value.string(name)}
    return {**vocabulary(byte_level=cutting.is_byte_level), **pre}


@needs_llama_cpp
@pytest.mark.parametrize("name", CUTTINGS)
def test_ids_are_llama_cpps(name: str, tmp_path: Path) -> None:
    keys = keys_of(name)
    path = tmp_path / "vocab.gguf"
    path.write_bytes(FileLayout.of(keys, ()).header)
    with oracle.Model(path, vocab_only=True) as model:
        for parse_special in (False, True):
            encoder = make_encoder(keys, parse_special=parse_special)
            for text in (*HOSTILE, LINES, "a<s>b <s>"):
                assert encoder.encode(text) == model.tokenize(text, parse_special=parse_special), text
        begins = model.tokenize("a", add_special=True)[0] == keys["tokenizer.ggml.bos_token_id"].data
        assert (bos_of(keys) is not None) == begins


def test_the_text_tells_all_cuttings_apart() -> None:
    """So a row of the table with another's expressions fails above."""
    by_regexes = {CUTTINGS[name].regexes: name for name in CUTTINGS if CUTTINGS[name].is_byte_level}
    ids = {
        name: [make_encoder(keys_of(name)).encode(text) for text in HOSTILE] for name in by_regexes.values()
    }
    for one, other in itertools.combinations(ids, 2):
        assert ids[one] != ids[other], (one, other)


def test_a_file_without_the_name_is_cut_as_llama_cpp_does() -> None:
    keys = keys_of("default")
    nameless = {key: value for key, value in keys.items() if key != "tokenizer.ggml.pre"}
    assert make_encoder(nameless).encode(LINES) == make_encoder(keys).encode(LINES)


def test_gemma_has_its_cutting_by_its_model() -> None:
    gemma = {**keys_of("gemma4"), "tokenizer.ggml.model": Value.string("gemma4")}
    del gemma["tokenizer.ggml.pre"]
    assert make_encoder(gemma).encode(LINES) == make_encoder(keys_of("gemma4")).encode(LINES)
    assert bos_of(gemma) == gemma["tokenizer.ggml.bos_token_id"].data


def test_a_name_that_llama_cpp_lacks() -> None:
    keys = {**keys_of("default"), "tokenizer.ggml.pre": Value.string("qwen9")}
    with pytest.raises(BadTokenizer, match=r"'qwen9', expected one of a\.x-4\.0, afmoe, .*, youtu"):
        make_encoder(keys)


def test_merges_of_what_is_no_token() -> None:
    keys = {**keys_of("default"), "tokenizer.ggml.merges": Value.strings(["q qqq"])}
    with pytest.raises(BadTokenizer, match="can't use the vocabulary"):
        make_encoder(keys)
