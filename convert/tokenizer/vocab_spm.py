"""Reads a SentencePiece vocabulary: out of tokenizer.model and the files of added tokens beside it, or, where
there is none, out of tokenizer.json.

That tokenizer.json is a BPE with byte_fallback. It has merges instead of scores, and GGUF has no place for
those. So all tokens get the score that llama.cpp's converter gives (LlamaHfVocab), and llama.cpp cuts some
words otherwise.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from convert.tokenizer.added_tokens import attribute_notes
from convert.tokenizer.files import TokenizerFiles
from convert.tokenizer.sentencepiece_model import (
    BPE,
    SentencePieceModel,
    read_sentencepiece_model,
)
from convert.tokenizer.sentencepiece_notes import model_notes
from convert.tokenizer.vocab import TokenType, Vocab, added_tokens_of, check_fits, looks_special, pad_text
from convert.tokenizer.vocab_bpe import (
    add_tokens_of_config,
    added_tokens_in,
    check_affixes,
    named_special_tokens,
    read_merges,
    unused_added_tokens,
)
from gguf_tools.errors import BadTokenizer
from gguf_tools.findings import listed
from gguf_tools.text import quoted, shown

# Scores that llama.cpp's converter gives to tokens without one.
PAD_SCORE = -10000.0
ADDED_SCORE = -1000.0


def read_spm_vocab(path: Path, files: TokenizerFiles) -> tuple[Vocab, SentencePieceModel]:
    """Return the vocabulary of a tokenizer.model, with its neighbours' added tokens, padded to the rows of
    the embedding; and the model, which names special tokens and says whether a text gets a leading space.

    raises  BadTokenizer when the file is no BPE SentencePiece model, or an id doesn't fit or is taken twice
    """
    model = read_sentencepiece_model(path)
    if model.model_type != BPE:
        raise BadTokenizer(f"{path}: a SentencePiece model of type unigram, word or char; expected BPE")

    n_rows = len(model.pieces) if files.vocab_size is None else files.vocab_size
    tokens = [pad_text(token_id) for token_id in range(n_rows)]
    scores = [PAD_SCORE] * n_rows
    types = [TokenType.UNUSED] * n_rows
    for token_id, piece in enumerate(model.pieces):
        check_fits(path, piece.text, token_id, n_rows)
        tokens[token_id], scores[token_id] = piece.text, piece.score
        # llama.cpp has no type for a piece that a user defined; its converter takes it for a normal token.
        is_own = piece.kind is TokenType.USER_DEFINED
        types[token_id] = TokenType.NORMAL if is_own else piece.kind

    notes: list[str] = []
    for source, text, token_id, kind in _added_tokens(files):
        check_fits(source, text, token_id, n_rows)
        if types[token_id] is not TokenType.UNUSED and tokens[token_id] not in (text, text.replace(" ", "▁")):
            both = f"{quoted(text)} instead of {quoted(tokens[token_id])}"
            notes.append(f"{source.name}: token {token_id} is {both}")
        tokens[token_id], scores[token_id], types[token_id] = text, ADDED_SCORE, kind

    vocab = Vocab(tuple(tokens), tuple(types), scores=tuple(scores))
    notes += _disagreements(path, model, files, vocab)
    vocab = replace(vocab, notes=(*notes, *model_notes(path, model, vocab)))
    return vocab, model


def _disagreements(
    path: Path, model: SentencePieceModel, files: TokenizerFiles, vocab: Vocab
) -> Iterator[str]:
    """Yield a note for each way in which a tokenizer.json beside the model has other tokens."""
    if not files.tokenizer_json:
        return
    ours, theirs = path.name, files.json_path.name
    added = added_tokens_in(files.json_path, files.tokenizer_json)
    pieces = {piece.text: token_id for token_id, piece in enumerate(model.pieces)}
    base = files.tokenizer_json["model"].get("vocab")
    if isinstance(base, Mapping):
        texts = {text for text, _ in added}
        other = {text: number for text, number in base.items() if text in pieces or text not in texts}
        if other != pieces:
            n_same = sum(other.get(text) == token_id for text, token_id in pieces.items())
            yield (
                f"{theirs} has {len(other)} tokens and {ours} {len(pieces)}, {n_same} of them alike: {ours}"
                " is used"
            )
    rows = dict(enumerate(text.replace("▁", " ") for text in vocab.tokens))
    lost = [text for text, token_id in added if rows.get(token_id) != text.replace("▁", " ")]
    if lost:
        yield f"{theirs}: added token {listed(lost, 1)} is not in {ours} or beside it: left out"


def _added_tokens(files: TokenizerFiles) -> Iterator[tuple[Path, str, int, TokenType]]:
    """Yield (file, text, id, type): first of added_tokens.json, then of tokenizer_config.json, which wins."""
    path = files.added_path
    seen: dict[int, str] = {}
    for text, token_id in files.added_tokens.items():
        if not isinstance(token_id, int):
            found = shown(repr(token_id))
            raise BadTokenizer(f"{path}: token {quoted(text)} has id {found}, expected a number")
        if token_id in seen:
            both = f"{quoted(seen[token_id])} and {quoted(text)}"
            raise BadTokenizer(f"{path}: tokens {both} have the same id {token_id}")
        seen[token_id] = text
        yield path, text, token_id, TokenType.USER_DEFINED
    path = files.config_path
    for token_id, text, entry in added_tokens_of(path, files.tokenizer_config):
        if entry.get("special") or looks_special(text):
            yield path, text, token_id, TokenType.CONTROL
        else:
            yield path, text.replace("▁", " "), token_id, TokenType.USER_DEFINED


_BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")


def is_sentencepiece_bpe(tokenizer_json: Mapping[str, Any]) -> bool:
    """Return whether a tokenizer.json has the tokens of a SentencePiece model, single bytes among them."""
    model = tokenizer_json.get("model")
    if not isinstance(model, Mapping) or model.get("type") != "BPE" or not model.get("byte_fallback"):
        return False
    vocab = model.get("vocab")
    return isinstance(vocab, Mapping) and any(map(_BYTE.fullmatch, vocab))


def read_spm_json_vocab(files: TokenizerFiles) -> Vocab:
    """Return the vocabulary of tokenizer.json, padded to the rows of the embedding with unused tokens.

    raises  BadTokenizer for ids that are missing or past the embedding
    """
    path, vocab_size = files.json_path, files.vocab_size
    check_affixes(path, files.tokenizer_json["model"])  # first: the library panics, and prints, at some
    library = files.load()
    added_tokens_in(path, files.tokenizer_json)
    notes = add_tokens_of_config(library, files)
    n_base = library.get_vocab_size(with_added_tokens=False)
    text_of = {token_id: text for text, token_id in library.get_vocab(with_added_tokens=True).items()}
    special = {text for text, _ in named_special_tokens(files)}
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
    notes += [*attribute_notes(library, files), *unused_added_tokens(files, text_of)]
    n_pads = n_rows - n_tokens
    tokens += [pad_text(token_id) for token_id in range(n_tokens, n_rows)]
    types += [TokenType.UNUSED] * n_pads
    scores = (ADDED_SCORE,) * n_tokens + (PAD_SCORE,) * n_pads
    notes.append(
        f"{path.name} has merges and no scores: llama.cpp cuts some words otherwise; a tokenizer.model beside"
        " it would have them"
    )
    return Vocab(tuple(tokens), tuple(types), scores=scores, notes=tuple(notes))


def read_merged_pieces(files: TokenizerFiles, visible: Container[str]) -> Vocab:
    """Return the vocabulary of a tokenizer.json with its merges, which Gemma 4's files have, too.

    visible  tokens that programs print though they are special
    raises   see `read_spm_json_vocab`
    """
    vocab = read_spm_json_vocab(files)
    types = tuple(
        TokenType.USER_DEFINED if text in visible else kind
        for text, kind in zip(vocab.tokens, vocab.types, strict=True)
    )
    merges = read_merges(files.json_path, files.tokenizer_json["model"]["merges"])
    return replace(vocab, types=types, merges=merges, notes=vocab.notes[:-1])


def _type(text: str, *, is_special: bool, is_base: bool) -> TokenType:
    if is_base and _BYTE.fullmatch(text):
        return TokenType.BYTE
    if is_special:
        return TokenType.CONTROL
    return TokenType.NORMAL if is_base else TokenType.USER_DEFINED
