"""The header of a GGUF file: bytes to values, and values to bytes.

The format, version 3 (numbers in the file's byte order, except the magic):

    4 bytes   the letters GGUF
    uint32    version: 2 or 3, the same layout (3 allows big endian; 1 had 32-bit lengths)
    uint64    number of tensors
    uint64    number of metadata pairs
    then each metadata pair
      string    key: uint64 length, that many bytes of UTF-8, no terminator
      uint32    kind of the value, see values.Kind
      ...       the value: a number of 1, 2, 4 or 8 bytes; a bool as one byte; a string;
                an array: uint32 kind of the items, uint64 how many, then the items without kinds
                (items that are arrays begin with their own kind and count)
    then each tensor
      string    name
      uint32    number of dimensions, at most 4
      uint64    each dimension, columns first
      uint32    type id, see ggml_types
      uint64    offset of the data, counted from where the data begins
    zeros     up to the next multiple of the alignment: there the data begins
    then each tensor's data at its offset, a multiple of the alignment

The alignment is metadata `general.alignment` (uint32, a power of two), 32 without it. Nothing in a
file tells its byte order but the version: read the wrong way round, its low 16 bits are zero.

Forbidden, and refused by `decode_header`: a key or tensor name twice, a dimension of 0, a length or
count that the rest of the file can't hold, arrays nested deeper than 64, more than 2**25 array
items in all. Counts are checked against the file's size before anything of their size is made, and
time is linear in the bytes read. Only `check_data` looks at where tensor data lie.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from mmap import mmap
from typing import Any, Literal

from gguf_tools import ggml_types, keys
from gguf_tools.errors import FormatError, ShapeError, TruncatedError, UnsupportedVersion
from gguf_tools.tensors import TensorInfo
from gguf_tools.values import FIXED_BYTES, FIXED_CODES, Kind, Metadata, Value, bytes_of

Endian = Literal["little", "big"]

MAGIC = b"GGUF"
VERSION = 3
DEFAULT_ALIGNMENT = 32
MAX_DIMS = 4
MAX_NAME_BYTES = 63  # llama.cpp keeps names in char[64]
MAX_NESTING = 64
MAX_ARRAY_ITEMS = 1 << 25

_ORDER: Mapping[Endian, str] = {"little": "<", "big": ">"}
_MIN_PAIR_BYTES = 8 + 4 + 1
_MIN_TENSOR_BYTES = 8 + 4 + 4 + 8


@dataclass(frozen=True)
class Header:
    """What a header says.

    offsets     of each tensor's data, from `data_start`, in the tensors' order
    n_bytes     of the header itself, without padding
    data_start  where the data begin: `n_bytes` rounded up to the alignment
    """

    version: int
    endian: Endian
    alignment: int
    metadata: dict[str, Value]
    tensors: dict[str, TensorInfo]
    offsets: tuple[int, ...]
    n_bytes: int
    data_start: int


def align_up(n_bytes: int, alignment: int) -> int:
    """`n_bytes` rounded up to a multiple of `alignment`."""
    return -(-n_bytes // alignment) * alignment


def alignment_of(metadata: Metadata, source: str) -> int:
    """The alignment that `metadata` asks for; raises FormatError if it isn't a power of two."""
    value = metadata.get(keys.ALIGNMENT)
    if value is None:
        return DEFAULT_ALIGNMENT
    if value.kind is not Kind.UINT32:
        raise FormatError(f"{source}: key {keys.ALIGNMENT!r} is {value.type_name}, expected uint32")
    alignment = int(value.data)
    if alignment <= 0 or alignment & (alignment - 1):
        raise FormatError(f"{source}: key {keys.ALIGNMENT!r} is {alignment}, expected a power of two")
    return alignment


# --- decoding -------------------------------------------------------------------------------


class _Cursor:
    """A position in a buffer that never leaves it."""

    def __init__(self, buffer: bytes | mmap, source: str) -> None:
        self.buffer = buffer
        self.source = source
        self.size = len(buffer)
        self.position = 0
        self.order = "<"
        self.items_left = MAX_ARRAY_ITEMS

    def require(self, n_bytes: int, what: str) -> None:
        left = self.size - self.position
        if n_bytes > left:
            raise TruncatedError(
                f"{self.source}: {what} at byte {self.position} needs {n_bytes} bytes, "
                f"the file has {left} more; truncated or damaged"
            )

    def fixed(self, code: str, n_bytes: int, what: str) -> Any:
        self.require(n_bytes, what)
        (value,) = struct.unpack_from(self.order + code, self.buffer, self.position)
        self.position += n_bytes
        return value

    def u32(self, what: str) -> int:
        return int(self.fixed("I", 4, what))

    def u64(self, what: str) -> int:
        return int(self.fixed("Q", 8, what))

    def string(self, what: str) -> str:
        n_bytes = self.u64(f"the length of {what}")
        self.require(n_bytes, what)
        start = self.position
        self.position += n_bytes
        return self.buffer[start : self.position].decode("utf-8", "surrogateescape")

    def kind(self, what: str) -> Kind:
        number = self.u32(f"the kind of {what}")
        try:
            return Kind(number)
        except ValueError:
            raise FormatError(f"{self.source}: {what} has kind {number}, expected 0 to {max(Kind)}") from None


def decode_header(buffer: bytes | mmap, source: str) -> Header:
    """Return what the header at the start of `buffer` says.

    buffer  a whole file, memory-mapped or in memory
    source  its name, for messages
    raises  FormatError, TruncatedError, UnsupportedVersion, each with `source` in front
    """
    cursor = _Cursor(buffer, source)
    cursor.require(len(MAGIC), "the magic")
    magic = bytes(buffer[: len(MAGIC)])
    if magic != MAGIC:
        raise FormatError(f"{source}: begins with {magic!r}, expected {MAGIC!r}; not a GGUF file")
    cursor.position = len(MAGIC)
    version, endian = _decode_version(cursor)
    n_tensors = cursor.u64("the number of tensors")
    n_pairs = cursor.u64("the number of metadata pairs")
    least = n_pairs * _MIN_PAIR_BYTES + n_tensors * _MIN_TENSOR_BYTES
    cursor.require(least, f"the header of {n_pairs} metadata pairs and {n_tensors} tensors")

    metadata: dict[str, Value] = {}
    for index in range(n_pairs):
        key = cursor.string(f"key {index}")
        if key in metadata:
            raise FormatError(f"{source}: key {key!r} appears twice")
        metadata[key] = _decode_value(cursor, f"key {key!r}")
    alignment = alignment_of(metadata, source)

    tensors: dict[str, TensorInfo] = {}
    offsets: list[int] = []
    for index in range(n_tensors):
        info, offset = _decode_tensor(cursor, index)
        if info.name in tensors:
            raise FormatError(f"{source}: tensor {info.name!r} appears twice")
        if offset % alignment:
            raise FormatError(
                f"{source}: tensor {info.name!r} has offset {offset}, "
                f"expected a multiple of the alignment {alignment}"
            )
        tensors[info.name] = info
        offsets.append(offset)
    n_bytes = cursor.position
    return Header(
        version, endian, alignment, metadata, tensors, tuple(offsets), n_bytes, align_up(n_bytes, alignment)
    )


def _decode_version(cursor: _Cursor) -> tuple[int, Endian]:
    """Read the version, and set the cursor's byte order by it."""
    version = cursor.u32("the version")
    endian: Endian = "little"
    if version and not version & 0xFFFF:
        (version,) = struct.unpack(">I", struct.pack("<I", version))
        endian = "big"
        cursor.order = ">"
    if version == 1:
        raise UnsupportedVersion(f"{cursor.source}: GGUF version 1, expected 2 or 3; convert the model again")
    if version not in (2, VERSION):
        raise UnsupportedVersion(f"{cursor.source}: GGUF version {version}, expected 2 or 3")
    return version, endian


def _decode_value(cursor: _Cursor, what: str) -> Value:
    kind = cursor.kind(what)
    if kind is Kind.STRING:
        return Value(kind, cursor.string(what))
    if kind is Kind.ARRAY:
        return _decode_array(cursor, what)
    return Value(kind, cursor.fixed(FIXED_CODES[kind], FIXED_BYTES[kind], what))


def _decode_array(cursor: _Cursor, what: str) -> Value:
    """Read an array. Arrays of arrays wait in `open_arrays`, outermost first, until they are full."""
    open_arrays: list[tuple[int, list[Value]]] = []
    while True:
        item = cursor.kind(f"the items of {what}")
        count = cursor.u64(f"the length of {what}")
        _require_items(cursor, item, count, what)
        if item is Kind.ARRAY and count:
            if len(open_arrays) == MAX_NESTING:
                raise FormatError(f"{cursor.source}: {what} has arrays nested deeper than {MAX_NESTING}")
            open_arrays.append((count, []))
            continue
        array = Value(Kind.ARRAY, _decode_items(cursor, item, count, what), item)
        while open_arrays:
            expected, items = open_arrays[-1]
            items.append(array)
            if len(items) < expected:
                break
            open_arrays.pop()
            array = Value(Kind.ARRAY, tuple(items), Kind.ARRAY)
        else:
            return array


def _require_items(cursor: _Cursor, item: Kind, count: int, what: str) -> None:
    """Raise unless the rest of the file can hold `count` items, and we are willing to hold them."""
    if item is Kind.ARRAY:
        least = 12
    elif item is Kind.STRING:
        least = 8
    else:
        least = FIXED_BYTES[item]
    cursor.require(count * least, f"{what}, an array of {count} {item.name.lower()},")
    if count > cursor.items_left:
        raise FormatError(f"{cursor.source}: {what} brings the array items to more than {MAX_ARRAY_ITEMS}")
    cursor.items_left -= count


def _decode_items(cursor: _Cursor, item: Kind, count: int, what: str) -> tuple[Any, ...]:
    """Read `count` items that are not arrays; their least size has been checked."""
    if item is Kind.STRING:
        return _decode_strings(cursor, count, what)
    if not count:
        return ()
    code = f"{cursor.order}{count}{FIXED_CODES[item]}"
    items = struct.unpack_from(code, cursor.buffer, cursor.position)
    cursor.position += count * FIXED_BYTES[item]
    return items


def _decode_strings(cursor: _Cursor, count: int, what: str) -> tuple[str, ...]:
    """Read `count` strings. A vocabulary has 100,000 and more, so the loop is kept bare."""
    buffer, size, position = cursor.buffer, cursor.size, cursor.position
    unpack_length = struct.Struct(cursor.order + "Q").unpack_from
    strings: list[str] = []
    for index in range(count):
        start = position + 8
        position = start + unpack_length(buffer, position)[0] if start <= size else size + 1
        if position > size:
            raise TruncatedError(f"{cursor.source}: {what}: string {index} of {count} ends outside the file")
        strings.append(buffer[start:position].decode("utf-8", "surrogateescape"))
    cursor.position = position
    return tuple(strings)


def _decode_tensor(cursor: _Cursor, index: int) -> tuple[TensorInfo, int]:
    name = cursor.string(f"the name of tensor {index}")
    where = f"{cursor.source}: tensor {name!r}"
    what = f"tensor {name!r}"
    n_dims = cursor.u32(what)
    if n_dims > MAX_DIMS:
        raise FormatError(f"{where} has {n_dims} dimensions, expected at most {MAX_DIMS}")
    dims = [cursor.u64(what) for _ in range(n_dims)]
    if 0 in dims:
        raise FormatError(f"{where} has a dimension of 0: {dims}")
    type_id = cursor.u32(what)
    try:
        info = TensorInfo(name, tuple(reversed(dims)), ggml_types.by_id(type_id))
        info.row_bytes  # noqa: B018  raises if the row can't be stored
    except (FormatError, ShapeError) as error:
        detail = str(error).removeprefix(f"{name}: ")
        raise FormatError(f"{where}: {detail}") from None
    return info, cursor.u64(what)


def check_data(header: Header, file_bytes: int, source: str) -> None:
    """Raise unless every tensor's data lie inside the file and no two share a byte.

    raises  TruncatedError if data end outside, FormatError if they overlap
    """
    if header.tensors and header.data_start > file_bytes:
        raise TruncatedError(
            f"{source}: the data begin at byte {header.data_start} (alignment {header.alignment}), "
            f"the file has {file_bytes} bytes"
        )
    ranges = []
    for info, offset in zip(header.tensors.values(), header.offsets, strict=True):
        start = header.data_start + offset
        end = start + info.n_bytes
        if end > file_bytes:
            raise TruncatedError(
                f"{source}: tensor {info.name!r} lies at bytes {start} to {end}, "
                f"the file has {file_bytes} bytes; truncated or damaged"
            )
        ranges.append((start, end, info.name))
    ranges.sort()
    for (_, end, name), (start, _, next_name) in pairwise(ranges):
        if start < end:
            raise FormatError(f"{source}: tensors {name!r} and {next_name!r} overlap at byte {start}")


# --- encoding -------------------------------------------------------------------------------


def encode_header(
    metadata: Metadata, tensors: Sequence[TensorInfo], offsets: Sequence[int], *, endian: Endian = "little",
    version: int = VERSION,
) -> bytes:
    """Return the bytes of a header, without the padding behind it.

    offsets  of each tensor's data, from where the data begin
    raises   FormatError for a name or a value that the format can't hold
    """
    if version not in (2, VERSION):
        raise FormatError(f"can't write GGUF version {version}, expected 2 or 3")
    order = _ORDER[endian]
    parts = [MAGIC, struct.pack(order + "IQQ", version, len(tensors), len(metadata))]
    for key, value in metadata.items():
        try:
            parts += [_encode_string(key, order), encode_value(value, endian)]
        except (struct.error, TypeError, UnicodeEncodeError, OverflowError) as error:
            raise FormatError(f"key {key!r}: can't be written as {value.type_name}: {error}") from None
    for info, offset in zip(tensors, offsets, strict=True):
        parts += _encode_tensor(info, offset, order)
    return b"".join(parts)


def _encode_tensor(info: TensorInfo, offset: int, order: str) -> list[bytes]:
    what = f"tensor {info.name!r}"
    name = _encode_string(info.name, order)
    if len(name) - 8 > MAX_NAME_BYTES:
        raise FormatError(f"{what}: its name has {len(name) - 8} bytes, expected at most {MAX_NAME_BYTES}")
    if len(info.shape) > MAX_DIMS or min(info.shape, default=1) < 1:
        raise FormatError(f"{what}: shape {info.shape}, expected at most {MAX_DIMS} dimensions of 1 or more")
    dims = info.shape[::-1]
    return [name, struct.pack(f"{order}I{len(dims)}QIQ", len(dims), *dims, info.type.id, offset)]


def _encode_string(text: str, order: str) -> bytes:
    raw = bytes_of(text)
    return struct.pack(order + "Q", len(raw)) + raw


def encode_value(value: Value, endian: Endian = "little") -> bytes:
    """The bytes of a value with its kind in front.

    raises  struct.error, TypeError or UnicodeEncodeError for data that are not what the kind says
    """
    order = _ORDER[endian]
    parts = [struct.pack(order + "I", value.kind)]
    if value.kind is Kind.STRING:
        parts.append(_encode_string(value.data, order))
    elif value.kind is Kind.ARRAY:
        parts += _encode_array(value, order)
    else:
        parts.append(struct.pack(order + FIXED_CODES[value.kind], value.data))
    return b"".join(parts)


def _encode_array(array: Value, order: str) -> list[bytes]:
    """The bytes of an array behind its kind; arrays inside arrays wait in `todo`, the next one last."""
    parts: list[bytes] = []
    todo = [array]
    while todo:
        value = todo.pop()
        if value.item is None:
            raise TypeError("an array holds something that is not an array")
        parts.append(struct.pack(order + "IQ", value.item, len(value.data)))
        if value.item is Kind.ARRAY:
            todo.extend(reversed(value.data))
        elif value.item is Kind.STRING:
            parts += [_encode_string(text, order) for text in value.data]
        else:
            parts.append(struct.pack(f"{order}{len(value.data)}{FIXED_CODES[value.item]}", *value.data))
    return parts
