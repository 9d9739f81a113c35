"""Reads a SentencePiece vocabulary out of a tokenizer.json, where no tokenizer.model stands beside it.

The file is a BPE with byte_fallback. It has merges instead of scores, and GGUF has no place for those. So all
tokens get the score that llama.cpp's converter gives (LlamaHfVocab), and llama.cpp cuts some words otherwise.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from convert.tokenizer.files import TokenizerFiles
from convert.tokenizer.vocab import TokenType, Vocab, check_fits, pad_text
from convert.tokenizer.vocab_bpe import (
    add_tokens_of_config,
    added_tokens_in,
    named_special_tokens,
)
from convert.tokenizer.vocab_spm import ADDED_SCORE, PAD_SCORE
from gguf_tools.errors import BadTokenizer

_BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")


def is_sentencepiece_bpe(tokenizer_json: Mapping[str, Any]) -> bool:
    """Return whether a tokenizer.json has the tokens of a SentencePiece model."""
    model = tokenizer_json.get("model")
    return isinstance(model, Mapping) and model.get("type") == "BPE" and bool(model.get("byte_fallback"))


def read_spm_json_vocab(files: TokenizerFiles) -> Vocab:
    """Return the vocabulary of tokenizer.json, padded to the rows of the embedding with unused tokens.

    raises  BadTokenizer for ids that are missing or past the embedding
    """
    path, vocab_size = files.json_path, files.vocab_size
    library = files.load()
    added_tokens_in(path, files.tokenizer_json)
    notes = add_tokens_of_config(library, files)
    n_base = library.get_vocab_size(with_added_tokens=False)
    text_of = {token_id: text for text, token_id in library.get_vocab(with_added_tokens=True).items()}
    special = {*named_special_tokens(files)}
    n_tokens = max(text_of, default=-1) + 1
    n_rows = n_tokens if vocab_size is None else vocab_size
    tokens: list[str] = []
    types: list[TokenType] = []
    for token_id in range(n_tokens):
        if token_id not in text_of:
            raise BadTokenizer(f"{path}: no token has id {token_id}, though ids go up to {n_tokens - 1}")
        text = text_of[token_id]
        check_fits(path, text, token_id, n_rows)
        tokens.append(text)
        types.append(_type(text, is_special=text in special, is_base=token_id < n_base))
    n_pads = n_rows - n_tokens
    tokens += [pad_text(token_id) for token_id in range(n_tokens, n_rows)]
    types += [TokenType.UNUSED] * n_pads
    scores = (ADDED_SCORE,) * n_tokens + (PAD_SCORE,) * n_pads
    notes.append(
        f"{path.name} has merges and no scores: llama.cpp cuts some words otherwise; a tokenizer.model beside"
        " it would have them"
    )
    return Vocab(tuple(tokens), tuple(types), scores=scores, notes=tuple(notes))


def _type(text: str, *, is_special: bool, is_base: bool) -> TokenType:
    if is_base and _BYTE.fullmatch(text):
        return TokenType.BYTE
    if is_special:
        return TokenType.CONTROL
    return TokenType.NORMAL if is_base else TokenType.USER_DEFINED
