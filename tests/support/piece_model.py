"""SentencePiece models, protocol buffers: their pieces, and what a BPE was trained with."""

from __future__ import annotations

import struct

Fields = tuple[bytes, ...]


def _varint(number: int) -> bytes:
    data = b""
    while number > 127:
        data += bytes([number & 127 | 128])
        number >>= 7
    return data + bytes([number])


def nested(number: int, fields: Fields) -> Fields:
    return _varint(number << 3 | 2), _varint(len(b"".join(fields))), *fields


def number(field: int, value: int) -> Fields:
    return _varint(field << 3), _varint(value)


def piece(text: bytes, score: float, kind: int) -> Fields:
    fields = (*nested(1, (text,)), _varint(2 << 3 | 5), struct.pack("<f", score), *number(3, kind))
    return nested(1, fields)


NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
TRAINED = nested(2, (*number(3, 2), *number(35, 1), *number(40, 0), *number(41, 1), *number(42, 2)))
"""A BPE model that falls back to bytes, and the ids of its first three pieces."""
