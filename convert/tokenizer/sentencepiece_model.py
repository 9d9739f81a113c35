"""Reads tokenizer.model, SentencePiece's protocol buffer, without its library.

Before it returns a single piece, the library builds a trie of all pieces and a table that normalizes text,
and some versions crash there on a hostile file. A vocabulary needs only this:

    ModelProto       1  pieces: messages     2  trainer: message      3  normalizer: message
                     5  denormalizer: message of the same form
    piece            1  text: bytes          2  score: float32        3  kind: number, see TokenType
    trainer          3  type of the model: number                     45 to 48  texts of unk, bos, eos, pad
                     24 whether a word's space stands behind it: number
    normalizer       1  name: bytes          2  table of characters: bytes
                     3, 4, 5  numbers, see Normalizer

A field begins with its number and wire type. Of a repeated field the last one counts; repeated messages are
merged. These are refused: a file that is cut off, a piece without text or with the text of another, and more
or fewer than one piece for unknown text.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from convert.tokenizer.vocab import TokenType
from gguf_tools.errors import BadTokenizer
from gguf_tools.files.named_files import read_input
from gguf_tools.text import quoted

MAX_BYTES = 8 << 20
MAX_PIECES = 1 << 18
"""XLM-RoBERTa has 250,000."""
MAX_PIECE_BYTES = 1 << 16


UNIGRAM, BPE = 1, 2
"""Types of models that are named here; 3 and 4 are WORD and CHAR."""


@dataclass(frozen=True, slots=True)
class Piece:
    text: str
    score: float
    kind: TokenType


@dataclass(frozen=True)
class Normalizer:
    """How text is changed before it is cut.

    charsmap             a table of characters and what takes their place, for the tokenizers library; empty
                         where all stay as they are
    add_space_prefix     a text gets a leading space
    drops_extra_spaces   leading and trailing spaces are left out, and all but one of several
    escapes_spaces       a space becomes ▁
    """

    name: str = ""
    charsmap: bytes = b""
    add_space_prefix: bool = True
    drops_extra_spaces: bool = True
    escapes_spaces: bool = True


@dataclass(frozen=True)
class SentencePieceModel:
    """Contents of a tokenizer.model.

    special_ids     kind ("bos", "eos", "unk", "pad") -> id, of those that the model has
    denormalizer    how text is changed that was put together from pieces
    space_is_last   the leading space of a text stands behind it instead
    """

    model_type: int
    pieces: tuple[Piece, ...]
    special_ids: Mapping[str, int]
    normalizer: Normalizer
    denormalizer: Normalizer
    space_is_last: bool


def read_sentencepiece_model(path: Path) -> SentencePieceModel:
    """Read the file at `path`; raises BadTokenizer when it is no SentencePiece model."""
    data = read_input(path, MAX_BYTES, BadTokenizer)
    try:
        return _model(data)
    except ValueError as cause:
        raise BadTokenizer(f"{path}: not a SentencePiece model: {cause}") from cause


# Kind, field of the trainer, and text where there is no such field; in the order in which they are written.
_SPECIAL = (("bos", 46, "<s>"), ("eos", 47, "</s>"), ("unk", 45, "<unk>"), ("pad", 48, "<pad>"))


def _model(data: bytes) -> SentencePieceModel:
    messages: dict[int, list[bytes]] = {1: [], 2: [], 3: [], 5: []}
    for number, _, value in _fields(data):
        if number in messages and isinstance(value, bytes):
            messages[number].append(value)
            if len(messages[1]) > MAX_PIECES:
                raise ValueError(f"more than {MAX_PIECES} pieces")
    pieces = tuple(map(_piece, messages[1]))
    ids = _ids_of(pieces)
    trainer, normalizer, denormalizer = (b"".join(messages[number]) for number in (2, 3, 5))
    return SentencePieceModel(
        model_type=_number(trainer, 3, UNIGRAM),
        pieces=pieces,
        special_ids=dict(_special_ids(pieces, ids, trainer)),
        normalizer=_normalizer(normalizer),
        denormalizer=_normalizer(denormalizer),
        space_is_last=bool(_number(trainer, 24, 0)),
    )


def _normalizer(message: bytes) -> Normalizer:
    flags = (bool(_number(message, number, 1)) for number in (3, 4, 5))
    return Normalizer(_text(message, 1, ""), _last(message, 2, b""), *flags)


def _special_ids(
    pieces: tuple[Piece, ...], ids: Mapping[str, int], trainer: bytes
) -> Iterator[tuple[str, int]]:
    """Yield kind and id of the pieces whose texts the trainer names, if they are of the right kind."""
    unknown = next(id_ for id_, piece in enumerate(pieces) if piece.kind is TokenType.UNKNOWN)
    for kind, number, default in _SPECIAL:
        id_ = ids.get(_text(trainer, number, default), unknown)  # what is no piece is unknown
        if pieces[id_].kind is (TokenType.UNKNOWN if kind == "unk" else TokenType.CONTROL):
            yield kind, id_


def _ids_of(pieces: tuple[Piece, ...]) -> dict[str, int]:
    """Return text -> id after checking the pieces; raises ValueError."""
    ids: dict[str, int] = {}
    for id_, piece in enumerate(pieces):
        if not piece.text:
            raise ValueError(f"piece {id_} has no text")
        if piece.text in ids:
            raise ValueError(f"pieces {ids[piece.text]} and {id_} are both {quoted(piece.text)}")
        ids[piece.text] = id_
    n_unknown = sum(piece.kind is TokenType.UNKNOWN for piece in pieces)
    if n_unknown != 1:
        raise ValueError(f"{n_unknown} of {len(pieces)} pieces stand for what is unknown, expected one")
    return ids


def _piece(message: bytes) -> Piece:
    raw, score, kind = b"", 0.0, TokenType.NORMAL
    for number, wire_type, value in _fields(message):
        if number == 1 and wire_type == _BYTES and isinstance(value, bytes):
            raw = value
        elif number == 2 and wire_type == _FOUR_BYTES and isinstance(value, bytes):
            (score,) = struct.unpack("<f", value)
        elif number == 3 and isinstance(value, int) and value in TokenType._value2member_map_:
            kind = TokenType(value)
    if len(raw) > MAX_PIECE_BYTES:
        raise ValueError(f"a piece of {len(raw)} bytes, expected at most {MAX_PIECE_BYTES}")
    return Piece(raw.decode("utf-8"), score, kind)


# --- protocol buffers

_NUMBER, _EIGHT_BYTES, _BYTES, _FOUR_BYTES = 0, 1, 2, 5
_FIXED_BYTES = {_EIGHT_BYTES: 8, _FOUR_BYTES: 4}


def _fields(message: bytes) -> Iterator[tuple[int, int, int | bytes]]:
    """Yield (number, wire type, value): int for numbers, else bytes; raises ValueError if it is cut off."""
    position = 0
    while position < len(message):
        tag, position = _varint(message, position)
        number, wire_type = divmod(tag, 8)
        if wire_type == _NUMBER:
            value, position = _varint(message, position)
            yield number, wire_type, value
            continue
        if wire_type == _BYTES:
            n_bytes, position = _varint(message, position)
        elif wire_type in _FIXED_BYTES:
            n_bytes = _FIXED_BYTES[wire_type]
        else:
            raise ValueError(f"a field of type {wire_type} before byte {position}")
        if n_bytes > len(message) - position:
            raise ValueError(f"a field of {n_bytes} bytes at byte {position} of {len(message)}")
        yield number, wire_type, message[position : position + n_bytes]
        position += n_bytes


def _varint(message: bytes, position: int) -> tuple[int, int]:
    """Return the number that begins at `position`, and where it ends: 7 bits a byte, the lowest first."""
    value = 0
    for index, byte in enumerate(message[position : position + 10]):
        value |= (byte & 0x7F) << 7 * index
        if byte < 0x80:
            return value, position + index + 1
    raise ValueError(f"no number at byte {position} of {len(message)}")


def _number(message: bytes, number: int, default: int) -> int:
    values = [value for n, _, value in _fields(message) if n == number and isinstance(value, int)]
    return values[-1] if values else default


def _text(message: bytes, number: int, default: str) -> str:
    return _last(message, number, default.encode()).decode("utf-8")


def _last(message: bytes, number: int, default: bytes) -> bytes:
    values = [value for n, type_, value in _fields(message) if n == number and type_ == _BYTES]
    return bytes(values[-1]) if values else default
