"""Reads the WordPiece vocabulary of a BERT out of tokenizer.json.

Such a tokenizer cuts text into words, and each word into the longest tokens from the left. A token that goes
on within a word begins with a prefix, "##". llama.cpp marks those that begin a word instead: with "▁". It
takes a word that has no such cutting for unknown, and puts [CLS] before a text and [SEP] behind it, whatever
the file says.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from convert.tokenizer.files import TokenizerFiles
from convert.tokenizer.pipeline_notes import common_notes, steps_of
from convert.tokenizer.vocab import TokenType, Vocab
from convert.tokenizer.vocab_bpe import read_library_vocab
from gguf_tools.errors import BadTokenizer
from gguf_tools.text import shown

WORDPIECE = "WordPiece"
_BEGINS_WORD = "▁"
_LIBRARY_LONGEST = 100
"""Number of characters of a word up to which tokenizers of published models cut it."""

_NAMES: Mapping[int, str] = {30522: "bert-bge", 21128: "bert-bge-large"}
"""Number of tokens -> name that llama.cpp's converter gives to the cutting: BERT's English vocabulary in
lower case, and the Chinese one. Its loader reads no name for such a vocabulary."""


def is_wordpiece(tokenizer_json: Mapping[str, Any]) -> bool:
    """Return whether a tokenizer.json is a WordPiece."""
    model = tokenizer_json.get("model")
    return isinstance(model, Mapping) and model.get("type") == WORDPIECE


def cutting_name(vocab: Vocab) -> str:
    """Return the name of the cutting, for tokenizer.ggml.pre."""
    return _NAMES.get(len(vocab.tokens), "default")


def read_wordpiece_vocab(files: TokenizerFiles) -> Vocab:
    """Return the vocabulary of tokenizer.json with its tokens as llama.cpp has them, padded to the embedding.

    raises  BadTokenizer for contradicting ids, ids past the embedding, or an unknown token that is no token
    """
    path, model = files.json_path, files.tokenizer_json["model"]
    library = files.load()
    vocab = read_library_vocab(files, library)
    unknown = model.get("unk_token")
    if unknown not in vocab.tokens:
        found = shown(repr(unknown))
        raise BadTokenizer(f"{path}: model.unk_token is {found}, expected a token of the vocabulary")
    prefix = model.get("continuing_subword_prefix", "##")

    def spelled(text: str, kind: TokenType) -> str:
        if kind is TokenType.CONTROL:
            return text
        return text.removeprefix(prefix) if text.startswith(prefix) and prefix else _BEGINS_WORD + text

    tokens = tuple(spelled(text, kind) for text, kind in zip(vocab.tokens, vocab.types, strict=True))
    return replace(vocab, tokens=tokens, notes=(*vocab.notes, *_notes(files.tokenizer_json)))


def _notes(tokenizer_json: Mapping[str, Any]) -> Iterator[str]:
    """Yield notes on what a BERT's tokenizer does otherwise in llama.cpp."""
    model = tokenizer_json["model"]
    if (longest := model.get("max_input_chars_per_word", _LIBRARY_LONGEST)) != _LIBRARY_LONGEST:
        length = shown(str(longest))
        yield f"words of more than {length} characters are cut; the original takes them for unknown"
    for step in steps_of(tokenizer_json.get("normalizer"), "normalizers"):
        if step.get("type") not in ("BertNormalizer", "Lowercase", "StripAccents", "NFD"):
            yield f"normalizer {shown(str(step.get('type')))} is not applied: llama.cpp has BERT's"
        for name in ("clean_text", "handle_chinese_chars"):
            if step.get(name) is False:
                yield f"normalizer: {name} is false; llama.cpp does it"
    for step in steps_of(tokenizer_json.get("pre_tokenizer"), "pretokenizers"):
        if step.get("type") != "BertPreTokenizer":
            yield f"pre-tokenizer {shown(str(step.get('type')))} is not applied: llama.cpp cuts words as BERT"
    decoder = tokenizer_json.get("decoder")
    is_usual = isinstance(decoder, Mapping) and decoder.get("type") == WORDPIECE
    yield from common_notes(
        {**tokenizer_json, "decoder": None} if is_usual else tokenizer_json, byte_level=False
    )
