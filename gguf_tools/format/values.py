"""Metadata values: thirteen kinds, each with the bytes it takes in a file.

A `Value` keeps the kind beside the data, because a reader may ask for exactly UINT32 and refuse
INT32. Data are plain Python: int, float, bool, str, or a tuple for an array. The items of an array
of arrays are Values themselves. Bytes that are not UTF-8 (tokenizers have such tokens) become lone
surrogates and turn back into the same bytes when written.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any


class Kind(IntEnum):
    """The type of a metadata value, as the number that the file stores."""

    UINT8 = 0
    INT8 = 1
    UINT16 = 2
    INT16 = 3
    UINT32 = 4
    INT32 = 5
    FLOAT32 = 6
    BOOL = 7
    STRING = 8
    ARRAY = 9
    UINT64 = 10
    INT64 = 11
    FLOAT64 = 12


#: `struct` codes of the kinds of fixed size.
FIXED_CODES: Mapping[Kind, str] = {
    Kind.UINT8: "B",
    Kind.INT8: "b",
    Kind.UINT16: "H",
    Kind.INT16: "h",
    Kind.UINT32: "I",
    Kind.INT32: "i",
    Kind.FLOAT32: "f",
    Kind.BOOL: "?",
    Kind.UINT64: "Q",
    Kind.INT64: "q",
    Kind.FLOAT64: "d",
}
FIXED_BYTES: Mapping[Kind, int] = {kind: struct.calcsize("<" + code) for kind, code in FIXED_CODES.items()}


_SHOWN_ITEMS = 40


def as_float32(number: float) -> float:
    """Return `number` rounded to the nearest float32, so that it reads back equal after writing."""
    return float(struct.unpack("<f", struct.pack("<f", number))[0])


@dataclass(frozen=True, slots=True)
class Value:
    """A metadata value.

    kind  what the file says it is
    data  int, float, bool, str; a tuple of them for an array; a tuple of Values for an array of arrays
    item  the kind of an array's items, None for anything else
    """

    kind: Kind
    data: Any
    item: Kind | None = None

    def __repr__(self) -> str:
        """Return the value, or for many items how many there are."""
        if isinstance(self.data, tuple | str) and len(self.data) > _SHOWN_ITEMS:
            unit = "characters" if isinstance(self.data, str) else "items"
            return f"<Value {self.type_name}: {len(self.data):,} {unit}>"
        return f"<Value {self.type_name}: {self.data!r}>"

    @classmethod
    def u8(cls, number: int) -> Value:
        return cls(Kind.UINT8, int(number))

    @classmethod
    def i8(cls, number: int) -> Value:
        return cls(Kind.INT8, int(number))

    @classmethod
    def u16(cls, number: int) -> Value:
        return cls(Kind.UINT16, int(number))

    @classmethod
    def i16(cls, number: int) -> Value:
        return cls(Kind.INT16, int(number))

    @classmethod
    def u32(cls, number: int) -> Value:
        return cls(Kind.UINT32, int(number))

    @classmethod
    def i32(cls, number: int) -> Value:
        return cls(Kind.INT32, int(number))

    @classmethod
    def u64(cls, number: int) -> Value:
        return cls(Kind.UINT64, int(number))

    @classmethod
    def i64(cls, number: int) -> Value:
        return cls(Kind.INT64, int(number))

    @classmethod
    def f32(cls, number: float) -> Value:
        """Return a float32 value; `number` is rounded to one."""
        return cls(Kind.FLOAT32, as_float32(number))

    @classmethod
    def f64(cls, number: float) -> Value:
        return cls(Kind.FLOAT64, float(number))

    @classmethod
    def bool_(cls, flag: bool) -> Value:
        return cls(Kind.BOOL, bool(flag))

    @classmethod
    def string(cls, text: str | bytes) -> Value:
        return cls(Kind.STRING, text_of(text))

    @classmethod
    def array(cls, item: Kind, data: Iterable[Any]) -> Value:
        """Return an array whose items are plain data of kind `item` (Values for Kind.ARRAY)."""
        return cls(Kind.ARRAY, tuple(data), item)

    @classmethod
    def u8s(cls, numbers: Iterable[int]) -> Value:
        return cls.array(Kind.UINT8, map(int, numbers))

    @classmethod
    def u32s(cls, numbers: Iterable[int]) -> Value:
        return cls.array(Kind.UINT32, map(int, numbers))

    @classmethod
    def i32s(cls, numbers: Iterable[int]) -> Value:
        return cls.array(Kind.INT32, map(int, numbers))

    @classmethod
    def f32s(cls, numbers: Iterable[float]) -> Value:
        return cls.array(Kind.FLOAT32, map(as_float32, numbers))

    @classmethod
    def bools(cls, flags: Iterable[bool]) -> Value:
        return cls.array(Kind.BOOL, map(bool, flags))

    @classmethod
    def strings(cls, texts: Iterable[str | bytes]) -> Value:
        return cls.array(Kind.STRING, map(text_of, texts))

    @property
    def plain(self) -> Any:
        """The data without Values inside: arrays of arrays become tuples of tuples."""
        if self.item is not Kind.ARRAY:
            return self.data
        return tuple(child.plain for child in self.data)

    @property
    def type_name(self) -> str:
        """The kind in words: "uint32", or "array of string"."""
        if self.item is None:
            return self.kind.name.lower()
        return f"array of {self.item.name.lower()}"


Metadata = Mapping[str, Value]


def text_of(text: str | bytes) -> str:
    """Return text as a str; bytes that are not UTF-8 become lone surrogates."""
    return text if isinstance(text, str) else bytes(text).decode("utf-8", "surrogateescape")


def bytes_of(text: str) -> bytes:
    """Return the UTF-8 bytes of a str; lone surrogates from `text_of` become the bytes they stand for."""
    return text.encode("utf-8", "surrogateescape")
