"""GGUF files built field by field: each function returns the fields of one thing, in file order.

b"".join((*head(n_tensors=1), *tensor("t", (32,)), bytes(128)))
"""

from __future__ import annotations

import struct

Fields = tuple[bytes, ...]

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)
"""Ids of the types of metadata values."""


def u16(number: int) -> bytes:
    return struct.pack("<H", number)


def u32(number: int) -> bytes:
    return struct.pack("<I", number)


def u64(number: int) -> bytes:
    return struct.pack("<Q", number)


def text(value: str | bytes) -> Fields:
    """A string: its length, then its bytes."""
    raw = value.encode() if isinstance(value, str) else value
    return u64(len(raw)), raw


def head(n_tensors: int = 0, n_pairs: int = 0, version: int = 3) -> Fields:
    return b"GGUF", u32(version), u64(n_tensors), u64(n_pairs)


def pair(key: str | bytes, kind: int, *value: bytes) -> Fields:
    """A metadata pair: key, type of the value, value."""
    return *text(key), u32(kind), *value


def word(key: str, value: str | bytes) -> Fields:
    return pair(key, STRING, *text(value))


def number(key: str, value: int) -> Fields:
    """A metadata pair with a uint32 value."""
    return pair(key, U32, u32(value))


def array(key: str, item: int, count: int, *items: bytes) -> Fields:
    """A metadata pair with an array that claims to have `count` items."""
    return pair(key, ARRAY, u32(item), u64(count), *items)


def strings(key: str, *texts: str | bytes) -> Fields:
    return array(key, STRING, len(texts), *(part for value in texts for part in text(value)))


def tensor(name: str | bytes, dims: tuple[int, ...] = (32,), type_id: int = 0, offset: int = 0) -> Fields:
    """The description of a tensor; `dims` begins with the columns."""
    return *text(name), u32(len(dims)), *map(u64, dims), u32(type_id), u64(offset)
