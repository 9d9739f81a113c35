"""tokenizer.model, a protocol buffer."""

from __future__ import annotations

import random
import struct

from tests.fuzz import mutate, scratch
from tests.fuzz.tokenizer import read

Fields = tuple[bytes, ...]


def _varint(number: int) -> bytes:
    data = b""
    while number > 127:
        data += bytes([number & 127 | 128])
        number >>= 7
    return data + bytes([number])


def _nested(number: int, fields: Fields) -> Fields:
    return _varint(number << 3 | 2), _varint(len(b"".join(fields))), *fields


def _number(number: int, value: int) -> Fields:
    return _varint(number << 3), _varint(value)


def piece(text: bytes, score: float, kind: int) -> Fields:
    fields = (*_nested(1, (text,)), _varint(2 << 3 | 5), struct.pack("<f", score), *_number(3, kind))
    return _nested(1, fields)


NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4
MODEL = (
    *piece(b"<unk>", 0, UNKNOWN),
    *piece(b"<s>", 0, CONTROL),
    *piece(b"</s>", 0, CONTROL),
    *piece("▁a".encode(), -1.5, NORMAL),
    *piece(b"b", -2.5, NORMAL),
    *piece(b"<x>", 0, USER_DEFINED),
    *_nested(2, (*_number(3, 2), *_number(40, 0), *_number(41, 1), *_number(42, 2))),
    *_nested(3, (*_nested(1, (b"identity",)), *_number(3, 1), *_number(4, 0))),
)


def make(rng: random.Random) -> bytes:
    """Return a valid file with a few changes."""
    return mutate.segments(rng, MODEL)


def warm_up() -> None:
    one_input(b"".join(MODEL))


def one_input(data: bytes) -> None:
    folder = scratch.folder("tokenizer_model")
    if not any(folder.iterdir()):
        (folder / "config.json").write_text('{"vocab_size": 12}')
        (folder / "tokenizer_config.json").write_text(
            '{"added_tokens_decoder": {"7": {"content": "<y>", "special": true}}}'
        )
    (folder / "tokenizer.model").write_bytes(data)
    read(folder)
