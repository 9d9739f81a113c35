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

The alignment is metadata `general.alignment` (uint32, a power of two), 32 without it. The byte
order of a file shows in its version alone: read the wrong way round, its low 16 bits are zero.

Forbidden, and refused by `read_header`: a key or tensor name twice, a key of more than 65535 bytes or a name
of more than 1024, a dimension of 0, a length or count that the rest of the file can't hold, arrays nested
deeper than 64, contents that take more memory than MAX_MEMORY. Counts are checked before anything of
their size is made or read, and time is linear in the bytes read. Only `check_data` looks at where tensor
data lie.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any, Literal

from gguf_tools.errors import FormatError, ShapeError, TruncatedError, UnsupportedVersion
from gguf_tools.format import ggml_types, keys
from gguf_tools.format.tensors import TensorInfo
from gguf_tools.format.values import FIXED_BYTES, FIXED_CODES, Kind, Metadata, Value, bytes_of
from gguf_tools.text import quoted

MAX_MEMORY = 160 << 20
"""Budget of memory for the contents of one header: twice what the largest vocabularies take."""

READ_AT_ONCE = 1 << 18

# Of each byte of a text: as it is read, and as characters. One of 4 bytes makes every other take as many.
_ASCII_MEMORY = 1 + 1
_UNICODE_MEMORY = 1 + 4

Read = Callable[[int, int], bytes]
"""Function of (offset, n_bytes) that returns those bytes, fewer where the file ends."""


class Cursor:
    """A position in an untrusted file that never leaves it, and a window on the bytes that follow.

    A count in a header costs its writer eight bytes. So a reader checks twice before it makes anything of a
    size that the file names: that the rest of the file can hold it (`require`), and that the budget allows it
    (`charge`).

    source  the file's name; messages put a method's `what` after it
    order   of the bytes of numbers, as struct has it: "<" or ">"

    All methods that read raise TruncatedError where the file ends, and whatever `read` raises.
    """

    def __init__(self, read: Read, size: int, source: str) -> None:
        self.source = source
        self.size = size
        self.order = "<"
        self.memory_left = MAX_MEMORY
        self._read = read
        self._window = b""
        self._window_start = 0
        self._at = 0

    @property
    def position(self) -> int:
        return self._window_start + self._at

    def require(self, n_bytes: int, what: str) -> None:
        """Raise TruncatedError unless the rest of the file has `n_bytes` bytes."""
        left = self.size - self.position
        if n_bytes > left:
            raise TruncatedError(
                f"{self.source}: {what} at byte {self.position} needs {n_bytes} bytes, "
                f"the file has {left} more; truncated or damaged"
            )

    def charge(self, n_bytes: int, what: str) -> None:
        """Take memory from the budget; raises FormatError if it is exceeded."""
        self.memory_left -= n_bytes
        if self.memory_left < 0:
            raise FormatError(f"{self.source}: {what} would take more than {MAX_MEMORY >> 20} MiB of memory")

    def take(self, n_bytes: int, what: str) -> bytes:
        """Return the next bytes, and move past them."""
        stop = self._at + n_bytes
        if stop > len(self._window):
            self.require(n_bytes, what)
            self._slide(n_bytes)
            stop = n_bytes
        data = self._window[self._at : stop]
        self._at = stop
        return data

    def _slide(self, n_bytes: int) -> None:
        """Move the window so that it starts here and holds at least `n_bytes`."""
        self._window_start, self._at = self.position, 0
        wanted = min(max(n_bytes, READ_AT_ONCE), self.size - self._window_start)
        self._window = self._read(self._window_start, wanted)
        if len(self._window) < wanted:
            raise TruncatedError(
                f"{self.source}: ends at byte {self._window_start + len(self._window)}, "
                f"had {self.size} bytes when it was opened"
            )

    def fixed(self, code: str, n_bytes: int, what: str) -> Any:
        """Read one number with a struct code that takes `n_bytes`."""
        (value,) = struct.unpack(self.order + code, self.take(n_bytes, what))
        return value

    def u32(self, what: str) -> int:
        return int(self.fixed("I", 4, what))

    def u64(self, what: str) -> int:
        return int(self.fixed("Q", 8, what))

    def string(self, what: str, most: int | None = None) -> str:
        """Read a string of at most `most` bytes; those that are not UTF-8 become lone surrogates."""
        n_bytes = self.u64(f"the length of {what}")
        self.require(n_bytes, what)
        if most is not None and n_bytes > most:
            raise FormatError(f"{self.source}: {what} has {n_bytes} bytes, expected at most {most}")
        self.charge(_ASCII_MEMORY * n_bytes, what)
        raw = self.take(n_bytes, what)
        if not raw.isascii():
            self.charge((_UNICODE_MEMORY - _ASCII_MEMORY) * n_bytes, what)
        return raw.decode("utf-8", "surrogateescape")

    def strings(self, count: int, what: str) -> tuple[str, ...]:
        """Read `count` strings. A vocabulary has 100,000 and more, so the loop works on the window itself."""
        unpack_length = struct.Struct(self.order + "Q").unpack_from
        window, at, memory_left = self._window, self._at, self.memory_left
        end = len(window)
        strings: list[str] = []
        for index in range(count):
            start = at + 8
            if start <= end:
                stop = start + unpack_length(window, at)[0]
                if stop <= end and memory_left >= 0:
                    raw = window[start:stop]
                    memory_left -= (stop - start) * (_ASCII_MEMORY if raw.isascii() else _UNICODE_MEMORY)
                    strings.append(raw.decode("utf-8", "surrogateescape"))
                    at = stop
                    continue
            self._at, self.memory_left = at, memory_left
            strings.append(self.string(f"string {index} of {count} of {what}"))
            window, at, memory_left = self._window, self._at, self.memory_left
            end = len(window)
        self._at, self.memory_left = at, memory_left
        return tuple(strings)

    def kind(self, what: str) -> Kind:
        """Read a kind; raises FormatError for a number that stands for none."""
        number = self.u32(f"the kind of {what}")
        try:
            return Kind(number)
        except ValueError:
            raise FormatError(f"{self.source}: {what} has kind {number}, expected 0 to {max(Kind)}") from None


Endian = Literal["little", "big"]

MAGIC = b"GGUF"
VERSION = 3
DEFAULT_ALIGNMENT = 32
MAX_DIMS = 4
MAX_NAME_BYTES = 63  # llama.cpp keeps names in char[64]
MAX_KEY_BYTES = 65535
MAX_READ_NAME_BYTES = 1024  # longer than MAX_NAME_BYTES, so that such a file can be looked at
MAX_NESTING = 64

# What things take in memory at most, in bytes; the first three count for more, so that a header of nothing
# else is decoded in two seconds. Texts besides, see `Cursor.string`.
_PAIR_MEMORY = 800
_TENSOR_MEMORY = 1200
_ARRAY_MEMORY = 500
_STRING_MEMORY = 80
_NUMBER_MEMORY = 40
_SMALL_NUMBER_MEMORY = 12  # of those that Python makes only once

_ORDER: Mapping[Endian, str] = {"little": "<", "big": ">"}
_MIN_PAIR_BYTES = 8 + 4 + 1
_MIN_TENSOR_BYTES = 8 + 4 + 4 + 8


@dataclass(frozen=True)
class Header:
    """Contents of a header.

    offsets     where each tensor's data begin, counted from `data_start`, in the tensors' order
    n_bytes     size of the header itself, without padding
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
    """Return `n_bytes` rounded up to a multiple of `alignment`."""
    return -(-n_bytes // alignment) * alignment


def alignment_of(metadata: Metadata, source: str) -> int:
    """Return the alignment that `metadata` asks for; raises FormatError if it isn't a power of two."""
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


def read_header(read: Read, file_bytes: int, source: str) -> Header:
    """Read the header at the start of a file.

    read    returns bytes of the file; called for little more than the header
    source  the file's name, for messages
    raises  FormatError, TruncatedError, UnsupportedVersion, each naming `source`; whatever `read` raises
    """
    cursor = Cursor(read, file_bytes, source)
    magic = cursor.take(len(MAGIC), "the magic")
    if magic != MAGIC:
        raise FormatError(f"{source}: begins with {magic!r}, expected {MAGIC!r}; not a GGUF file")
    version, endian = _decode_version(cursor)
    n_tensors = cursor.u64("the number of tensors")
    n_pairs = cursor.u64("the number of metadata pairs")
    counts = f"the header of {n_pairs} metadata pairs and {n_tensors} tensors"
    cursor.require(n_pairs * _MIN_PAIR_BYTES + n_tensors * _MIN_TENSOR_BYTES, counts)
    cursor.charge(n_pairs * _PAIR_MEMORY + n_tensors * _TENSOR_MEMORY, counts)

    metadata: dict[str, Value] = {}
    for index in range(n_pairs):
        key = cursor.string(f"key {index}", MAX_KEY_BYTES)
        if key in metadata:
            raise FormatError(f"{source}: key {quoted(key)} appears twice")
        metadata[key] = _decode_value(cursor, f"key {quoted(key)}")
    alignment = alignment_of(metadata, source)

    tensors: dict[str, TensorInfo] = {}
    offsets: list[int] = []
    for index in range(n_tensors):
        info, offset = _decode_tensor(cursor, index)
        if info.name in tensors:
            raise FormatError(f"{source}: tensor {quoted(info.name)} appears twice")
        if offset % alignment:
            raise FormatError(
                f"{source}: tensor {quoted(info.name)} has offset {offset}, "
                f"expected a multiple of the alignment {alignment}"
            )
        tensors[info.name] = info
        offsets.append(offset)
    n_bytes = cursor.position
    return Header(
        version, endian, alignment, metadata, tensors, tuple(offsets), n_bytes, align_up(n_bytes, alignment)
    )


def _decode_version(cursor: Cursor) -> tuple[int, Endian]:
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


def _decode_value(cursor: Cursor, what: str) -> Value:
    kind = cursor.kind(what)
    if kind is Kind.STRING:
        return Value(kind, cursor.string(what))
    if kind is Kind.ARRAY:
        return _decode_array(cursor, what)
    return Value(kind, cursor.fixed(FIXED_CODES[kind], FIXED_BYTES[kind], what))


def _decode_array(cursor: Cursor, what: str) -> Value:
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


def _require_items(cursor: Cursor, item: Kind, count: int, what: str) -> None:
    """Raise unless the rest of the file can hold `count` items, and we are willing to hold them."""
    if item is Kind.ARRAY:
        least, memory = 12, _ARRAY_MEMORY
    elif item is Kind.STRING:
        least, memory = 8, _STRING_MEMORY
    else:
        least = FIXED_BYTES[item]
        memory = _SMALL_NUMBER_MEMORY if item in (Kind.UINT8, Kind.BOOL) else _NUMBER_MEMORY
    items = f"{what}, an array of {count} {item.name.lower()},"
    cursor.require(count * least, items)
    cursor.charge(count * memory, items)


def _decode_items(cursor: Cursor, item: Kind, count: int, what: str) -> tuple[Any, ...]:
    """Read `count` items that are not arrays; their least size has been checked."""
    if item is Kind.STRING:
        return cursor.strings(count, what)
    if not count:
        return ()
    size = FIXED_BYTES[item]
    lengths = (min(READ_AT_ONCE, count - start) for start in range(0, count, READ_AT_ONCE))
    code = FIXED_CODES[item]
    pieces = (struct.unpack(f"{cursor.order}{n}{code}", cursor.take(n * size, what)) for n in lengths)
    return tuple(chain.from_iterable(pieces))


def _decode_tensor(cursor: Cursor, index: int) -> tuple[TensorInfo, int]:
    name = cursor.string(f"the name of tensor {index}", MAX_READ_NAME_BYTES)
    what = f"tensor {quoted(name)}"
    where = f"{cursor.source}: {what}"
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
        raise FormatError(f"{where}: {str(error).removeprefix(f'{name}: ')}") from None
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
                f"{source}: tensor {quoted(info.name)} lies at bytes {start} to {end}, "
                f"the file has {file_bytes} bytes; truncated or damaged"
            )
        ranges.append((start, end, info.name))
    ranges.sort()
    for (_, end, name), (start, _, next_name) in pairwise(ranges):
        if start < end:
            names = f"{quoted(name)} and {quoted(next_name)}"
            raise FormatError(f"{source}: tensors {names} overlap at byte {start}")


# --- encoding -------------------------------------------------------------------------------


def encode_header(
    metadata: Metadata,
    tensors: Sequence[TensorInfo],
    offsets: Sequence[int],
    *,
    endian: Endian = "little",
    version: int = VERSION,
) -> bytes:
    """Return the bytes of a header, without the padding after it.

    offsets  where each tensor's data begin, counted from the first
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
    """Return the bytes of a value, its kind first.

    raises  struct.error, TypeError or UnicodeEncodeError for data that do not have that kind
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
    """Return the bytes of an array after its kind; arrays inside arrays wait in `todo`, the next one last."""
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
