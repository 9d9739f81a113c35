"""Reading a SentencePiece vocabulary: tokenizer.model, and the tokens added to it beside it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from convert.json_files import read_json_object_if_there
from convert.vocab import TokenType, Vocab, added_tokens_of, check_fits, looks_special, pad_text
from gguf_tools.errors import BadTokenizer

# Scores that llama.cpp's converter gives to tokens without one.
PAD_SCORE = -10000.0
ADDED_SCORE = -1000.0

# TrainerSpec.ModelType. 1 is unigram: it looks for the best path, llama.cpp's "llama" for the best pair.
_BPE = 2


@dataclass(frozen=True)
class SentencePieceVocab:
    """What a tokenizer.model and its neighbours say.

    special_ids       ids that the model file itself names: bos, eos, unk, pad
    add_space_prefix  whether a text gets a leading space
    """

    vocab: Vocab
    special_ids: Mapping[str, int]
    add_space_prefix: bool


def read_spm_vocab(
    path: Path, tokenizer_config: Mapping[str, Any], vocab_size: int | None
) -> SentencePieceVocab:
    """Return the vocabulary of a tokenizer.model, with its neighbours' added tokens, padded to `vocab_size`.

    raises  BadTokenizer when the file is no BPE SentencePiece model, or an id doesn't fit or is taken twice
    """
    from sentencepiece import SentencePieceProcessor

    try:
        proto = path.read_bytes()
        model = SentencePieceProcessor(model_proto=proto)
        n_pieces = model.vocab_size()
    except (OSError, RuntimeError) as cause:
        raise BadTokenizer(f"{path}: not a SentencePiece model: {cause}") from cause
    trainer, normalizer = _message(proto, 2), _message(proto, 3)
    if _varint_field(trainer, 3, default=1) != _BPE:
        raise BadTokenizer(f"{path}: a SentencePiece model of type unigram, word or char; expected BPE")

    n_rows = n_pieces if vocab_size is None else vocab_size
    tokens = [pad_text(token_id) for token_id in range(n_rows)]
    scores = [PAD_SCORE] * n_rows
    types = [TokenType.UNUSED] * n_rows
    for token_id in range(n_pieces):
        text = model.id_to_piece(token_id)
        check_fits(path, text, token_id, n_rows)
        tokens[token_id], scores[token_id] = text, model.get_score(token_id)
        types[token_id] = _piece_type(model, token_id)

    notes: list[str] = []
    for source, text, token_id, kind in _added_tokens(path.parent, tokenizer_config):
        check_fits(source, text, token_id, n_rows)
        if types[token_id] is not TokenType.UNUSED and tokens[token_id] not in (text, text.replace(" ", "▁")):
            notes.append(f"{source.name}: token {token_id} is {text!r} instead of {tokens[token_id]!r}")
        tokens[token_id], scores[token_id], types[token_id] = text, ADDED_SCORE, kind

    ids = {"bos": model.bos_id(), "eos": model.eos_id(), "unk": model.unk_id(), "pad": model.pad_id()}
    return SentencePieceVocab(
        vocab=Vocab(tuple(tokens), tuple(types), scores=tuple(scores), notes=tuple(notes)),
        special_ids={kind: token_id for kind, token_id in ids.items() if token_id >= 0},
        add_space_prefix=bool(_varint_field(normalizer, 3, default=1)),
    )


def _piece_type(model: Any, token_id: int) -> TokenType:
    if model.is_unknown(token_id):
        return TokenType.UNKNOWN
    if model.is_control(token_id):
        return TokenType.CONTROL
    if model.is_unused(token_id):
        return TokenType.UNUSED
    if model.is_byte(token_id):
        return TokenType.BYTE
    return TokenType.NORMAL


def _added_tokens(
    folder: Path, tokenizer_config: Mapping[str, Any]
) -> Iterator[tuple[Path, str, int, TokenType]]:
    """Yield (file, text, id, type): first of added_tokens.json, then of tokenizer_config.json, which wins."""
    path = folder / "added_tokens.json"
    seen: dict[int, str] = {}
    for text, token_id in read_json_object_if_there(path, BadTokenizer).items():
        if not isinstance(token_id, int):
            raise BadTokenizer(f"{path}: token {text!r} has id {token_id!r}, expected a number")
        if token_id in seen:
            raise BadTokenizer(f"{path}: tokens {seen[token_id]!r} and {text!r} have the same id {token_id}")
        seen[token_id] = text
        yield path, text, token_id, TokenType.USER_DEFINED
    path = folder / "tokenizer_config.json"
    for token_id, text, entry in added_tokens_of(path, tokenizer_config):
        if entry.get("special") or looks_special(text):
            yield path, text, token_id, TokenType.CONTROL
        else:
            yield path, text.replace("▁", " "), token_id, TokenType.USER_DEFINED


# --- tokenizer.model is a protocol buffer; the library doesn't show its settings, so these few are read here


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield (number, value) of a protocol buffer message: bytes for nested ones, int otherwise."""
    position = 0

    def varint() -> int:
        nonlocal position
        value = shift = 0
        while True:
            byte = message[position]
            position += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    fixed_bytes = {1: 8, 5: 4}
    while position < len(message):
        number, wire_type = divmod(varint(), 8)
        if wire_type == 0:
            yield number, varint()
            continue
        n_bytes = varint() if wire_type == 2 else fixed_bytes[wire_type]
        yield number, message[position : position + n_bytes]
        position += n_bytes


def _message(proto: bytes, number: int) -> bytes:
    return next((value for n, value in _fields(proto) if n == number and isinstance(value, bytes)), b"")


def _varint_field(message: bytes, number: int, *, default: int) -> int:
    return next((value for n, value in _fields(message) if n == number and isinstance(value, int)), default)
