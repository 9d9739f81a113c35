"""The header codec: a file byte by byte, round trips, and everything that is refused."""

from __future__ import annotations

import struct
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gguf_tools import FileLayout, Kind, TensorInfo, Value
from gguf_tools.errors import FormatError, GGUFError, ToolkitError, TruncatedError, UnsupportedVersion
from gguf_tools.format import ggml_types as types
from gguf_tools.format.header import MAX_NESTING, Endian, Header, check_data, encode_header
from tests.gguf_tools.sample_files import METADATA, TENSORS, decode_header
from tests.support.work import count_steps

ENDIANS: tuple[Endian, ...] = ("little", "big")

#: A whole file: offset, bytes, meaning.
SMALL_FILE = """
00  47 47 55 46              the letters GGUF
04  03 00 00 00              version 3
08  01 00 00 00 00 00 00 00  1 tensor
10  02 00 00 00 00 00 00 00  2 metadata pairs
18  14 00 00 00 00 00 00 00    key of 20 bytes
20  67 65 6e 65 72 61 6c 2e    general.
28  61 72 63 68 69 74 65 63    architec
30  74 75 72 65                ture
34  08 00 00 00                kind 8, string
38  01 00 00 00 00 00 00 00    of 1 byte
40  78                         x
41  01 00 00 00 00 00 00 00    key of 1 byte
49  6e                         n
4a  09 00 00 00                kind 9, array
4e  03 00 00 00                of kind 3, int16
52  02 00 00 00 00 00 00 00    2 of them
5a  01 00 fe ff                1, -2
5e  01 00 00 00 00 00 00 00  name of 1 byte
66  74                       t
67  02 00 00 00              2 dimensions
6b  03 00 00 00 00 00 00 00  3 columns
73  01 00 00 00 00 00 00 00  1 row
7b  01 00 00 00              type 1, F16
7f  00 00 00 00 00 00 00 00  data at 0
87  00 00 00 00 00 00 00 00  zeros up to a multiple of 32
8f  00 00 00 00 00 00 00 00
97  00 00 00 00 00 00 00 00
9f  00
a0  00 3c 00 40 00 c0        1, 2, -2
a6  00 00 00 00 00 00 00 00  zeros up to a multiple of 32
ae  00 00 00 00 00 00 00 00
b6  00 00 00 00 00 00 00 00
be  00 00
"""


def bytes_of_listing(listing: str) -> bytes:
    """The bytes of an annotated listing, whose offsets must be right."""
    data = b""
    for line in listing.strip().splitlines():
        assert int(line[:2], 16) == len(data), line
        data += bytes.fromhex(line[4:27])
    return data


SMALL_METADATA = {
    "general.architecture": Value.string("x"),
    "n": Value.array(Kind.INT16, [1, -2]),
}
SMALL_TENSOR = TensorInfo("t", (1, 3), types.F16)


def test_small_file_is_written_byte_for_byte() -> None:
    layout = FileLayout.of(SMALL_METADATA, [SMALL_TENSOR])
    data = np.array([1, 2, -2], "<f2").tobytes()
    assert (layout.header + data).ljust(layout.total_bytes, b"\0") == bytes_of_listing(SMALL_FILE)


def test_small_file_is_read() -> None:
    data = bytes_of_listing(SMALL_FILE)
    header = decode_header(data, "small")
    assert header == Header(
        version=3,
        endian="little",
        alignment=32,
        metadata=SMALL_METADATA,
        tensors={"t": SMALL_TENSOR},
        offsets=(0,),
        n_bytes=0x87,
        data_start=0xA0,
    )
    check_data(header, len(data), "small")


@pytest.mark.parametrize("endian", ENDIANS)
@pytest.mark.parametrize("version", [2, 3])
def test_every_kind_comes_back(version: int, endian: Endian) -> None:
    nested = Value.array(Kind.ARRAY, [Value.i32s([1]), Value.array(Kind.ARRAY, [Value.strings(["x"])])])
    metadata = METADATA | {"nested": nested, "no_arrays": Value.array(Kind.ARRAY, [])}
    raw = encode_header(metadata, TENSORS, [0] * len(TENSORS), endian=endian, version=version)
    header = decode_header(raw, "f")
    assert (header.version, header.endian) == (version, endian)
    assert header.metadata == metadata
    assert tuple(header.tensors.values()) == TENSORS
    assert header.metadata["nested"].plain == ((1,), (("x",),))
    assert list(header.metadata) == list(metadata)


INTEGERS = {
    Kind.UINT8: (0, 2**8 - 1), Kind.INT8: (-(2**7), 2**7 - 1), Kind.UINT16: (0, 2**16 - 1),
    Kind.INT16: (-(2**15), 2**15 - 1), Kind.UINT32: (0, 2**32 - 1), Kind.INT32: (-(2**31), 2**31 - 1),
    Kind.UINT64: (0, 2**64 - 1), Kind.INT64: (-(2**63), 2**63 - 1),
}  # fmt: skip
SCALARS: dict[Kind, st.SearchStrategy] = {
    **{kind: st.integers(*limits) for kind, limits in INTEGERS.items()},
    Kind.FLOAT32: st.floats(width=32, allow_nan=False),
    Kind.FLOAT64: st.floats(allow_nan=False),
    Kind.BOOL: st.booleans(),
    Kind.STRING: st.binary(max_size=20).map(lambda raw: raw.decode("utf-8", "surrogateescape")),
}


SCALAR_VALUES = st.sampled_from(list(SCALARS)).flatmap(
    lambda kind: SCALARS[kind].map(lambda data: Value(kind, data))
)
FLAT_ARRAYS = st.sampled_from(list(SCALARS)).flatmap(
    lambda item: st.lists(SCALARS[item], max_size=4).map(lambda items: Value.array(item, items))
)
ARRAY_VALUES = st.recursive(
    FLAT_ARRAYS,
    lambda arrays: st.lists(arrays, max_size=3).map(lambda items: Value.array(Kind.ARRAY, items)),
    max_leaves=8,
)
TENSOR_INFOS = st.builds(
    lambda name, shape, type_: TensorInfo(name, (*shape, 2 * type_.block_elems), type_),
    st.text("abc.", min_size=1, max_size=8),
    st.lists(st.integers(1, 5), max_size=3),
    st.sampled_from(types.TYPES),
)


@settings(max_examples=150, deadline=None)
@given(
    metadata=st.dictionaries(st.text(max_size=8), SCALAR_VALUES | ARRAY_VALUES, max_size=5),
    tensors=st.lists(TENSOR_INFOS, max_size=5, unique_by=lambda info: info.name),
    endian=st.sampled_from(ENDIANS),
    alignment=st.sampled_from([1, 32, 4096]),
)
def test_round_trip(
    metadata: dict[str, Value], tensors: list[TensorInfo], endian: Endian, alignment: int
) -> None:
    layout = FileLayout.of(metadata, tensors, endian=endian, alignment=alignment)
    header = decode_header(layout.header, "f")
    check_data(header, layout.total_bytes, "f")
    assert header.metadata == layout.metadata
    assert tuple(header.tensors.values()) == tuple(tensors)
    assert tuple(header.data_start + offset for offset in header.offsets) == layout.offsets
    assert header.data_start == layout.data_start


# --- what is refused ------------------------------------------------------------------------


def u32(number: int) -> bytes:
    return struct.pack("<I", number)


def u64(number: int) -> bytes:
    return struct.pack("<Q", number)


def text(value: str) -> bytes:
    return u64(len(value)) + value.encode()


def head(n_tensors: int = 0, n_pairs: int = 0, version: int = 3) -> bytes:
    return b"GGUF" + u32(version) + u64(n_tensors) + u64(n_pairs)


def pair(key: str, kind: int, payload: bytes) -> bytes:
    return text(key) + u32(kind) + payload


def tensor(name: str = "t", dims: tuple[int, ...] = (32,), type_id: int = 0, offset: int = 0) -> bytes:
    return text(name) + u32(len(dims)) + b"".join(map(u64, dims)) + u32(type_id) + u64(offset)


DATA = bytes(4096)
HUGE = 2**63

BAD_FILES: dict[str, tuple[bytes, type[GGUFError], str]] = {
    "empty": (b"", TruncatedError, "the magic"),
    "another format": (b"PK\x03\x04" + DATA, FormatError, "not a GGUF file"),
    "magic in the other order": (b"FUGG" + DATA, FormatError, "not a GGUF file"),
    "only magic": (b"GGUF", TruncatedError, "the version"),
    "version 0": (head(version=0), UnsupportedVersion, "version 0"),
    "version 1": (head(version=1), UnsupportedVersion, "version 1.*convert the model again"),
    "version 4": (head(version=4), UnsupportedVersion, "version 4"),
    "ends in the counts": (head()[:-1], TruncatedError, "the number of metadata pairs"),
    "many tensors": (head(n_tensors=HUGE) + DATA, TruncatedError, f"0 metadata pairs and {HUGE} tensors"),
    "many pairs": (head(n_pairs=2**64 - 1) + DATA, TruncatedError, "metadata pairs and 0 tensors"),
    "counts that add up to zero": (head(2**64 - 1, 1) + DATA, TruncatedError, "tensors"),
    "long key": (head(0, 1) + u64(2**64 - 8) + DATA, TruncatedError, "key 0"),
    "key twice": (head(0, 2) + 2 * pair("k", 0, b"\1"), FormatError, "key 'k' appears twice"),
    "kind 13": (head(0, 1) + pair("k", 13, DATA), FormatError, "key 'k' has kind 13, expected 0 to 12"),
    "long string": (head(0, 1) + pair("k", 8, u64(HUGE) + DATA), TruncatedError, "key 'k'"),
    "ends in a number": (head(0, 1) + pair("k", 10, b"\0"), TruncatedError, "key 'k'.*needs 8 bytes"),
    "long array": (head(0, 1) + pair("k", 9, u32(0) + u64(HUGE) + DATA), TruncatedError, "array of"),
    "array whose bytes wrap around": (
        head(0, 1) + pair("k", 9, u32(10) + u64(2**61 + 1) + DATA), TruncatedError, "array of",
    ),
    "array of kind 99": (head(0, 1) + pair("k", 9, u32(99) + u64(1) + DATA), FormatError, "kind 99"),
    "array with a string that is too long": (
        head(0, 1) + pair("k", 9, u32(8) + u64(2) + text("a") + u64(99999) + DATA), TruncatedError,
        "string 1 of 2 of key 'k'.* needs 99999 bytes",
    ),
    "array that ends within a string's length": (
        head(0, 1) + pair("k", 9, u32(8) + u64(2) + u64(6) + bytes(8)), TruncatedError,
        "the length of string 1 of 2 of key 'k'",
    ),
    "array of many arrays": (
        head(0, 1) + pair("k", 9, u32(9) + u64(2**40) + DATA), TruncatedError, "array of",
    ),
    "arrays nested deep": (
        head(0, 1) + pair("k", 9, (u32(9) + u64(1)) * 100_000), FormatError,
        f"nested deeper than {MAX_NESTING}",
    ),
    "more items than a header needs": (
        head(0, 1) + pair("k", 9, u32(0) + u64(2**25 + 1) + bytes(2**25 + 1)), FormatError,
        "more than 160 MiB",
    ),
    "alignment 0": (
        head(0, 1) + pair("general.alignment", 4, u32(0)), FormatError, "is 0, expected a power of two",
    ),
    "alignment 48": (head(0, 1) + pair("general.alignment", 4, u32(48)), FormatError, "is 48"),
    "alignment that is int32": (
        head(0, 1) + pair("general.alignment", 5, u32(32)), FormatError, "is int32, expected uint32",
    ),
    "huge alignment": (
        head(1, 1) + pair("general.alignment", 4, u32(2**31)) + tensor() + DATA, TruncatedError,
        "alignment 2147483648",
    ),
    "tensor twice": (
        head(2) + tensor() + tensor(offset=128) + DATA, FormatError, "tensor 't' appears twice",
    ),
    "5 dimensions": (head(1) + tensor(dims=(1,) * 5) + DATA, FormatError, "5 dimensions, expected at most 4"),
    "4 billion dimensions": (
        head(1) + text("t") + u32(2**32 - 1) + DATA, FormatError, "4294967295 dimensions",
    ),
    "dimension 0": (head(1) + tensor(dims=(32, 0)) + DATA, FormatError, r"dimension of 0: \[32, 0\]"),
    "dimensions whose product wraps around": (
        head(1) + tensor(dims=(2**32, 2**32, 2**32)) + DATA, TruncatedError, "tensor 't' lies at",
    ),
    "negative dimension": (head(1) + tensor(dims=(2**64 - 32,)) + DATA, TruncatedError, "tensor 't' lies at"),
    "unknown type": (head(1) + tensor(type_id=4711) + DATA, FormatError, "tensor 't': unknown .* id 4711"),
    "row that the type can't hold": (
        head(1) + tensor(dims=(100, 2), type_id=12) + DATA, FormatError,
        r"tensor 't': row length 100 is not a multiple of 256 \(Q4_K\)",
    ),
    "misaligned offset": (head(1) + tensor(offset=16) + DATA, FormatError, "offset 16, expected a multiple"),
    "offset outside": (head(1) + tensor(offset=2**20) + DATA, TruncatedError, "tensor 't' lies at bytes"),
    "offset that wraps around": (head(1) + tensor(offset=2**64 - 32) + DATA, TruncatedError, "lies at bytes"),
    "data that end outside": (head(1) + tensor(dims=(32,)) + bytes(10), TruncatedError, "the file has"),
    "overlap": (
        head(2) + tensor("a") + tensor("b", offset=96) + DATA, FormatError, "'a' and 'b' overlap at byte",
    ),
    "ends in a tensor": (head(1) + tensor()[:-4], TruncatedError, "tensor 't'"),
    "control characters": (
        head(0, 2) + 2 * pair("k\n\x1b[2J", 0, b"\1"), FormatError, r"'k\\n\\x1b\[2J' appears twice",
    ),
}  # fmt: skip


def read(data: bytes) -> Header:
    header = decode_header(data, "bad.gguf")
    check_data(header, len(data), "bad.gguf")
    return header


@pytest.mark.parametrize("case", BAD_FILES)
def test_bad_file_is_one_named_line(case: str) -> None:
    data, error, message = BAD_FILES[case]
    with pytest.raises(error, match=message) as caught:
        read(data)
    line = str(caught.value)
    assert line.startswith("bad.gguf: ")
    assert line.isprintable()


def test_gaps_and_any_order_of_data_are_read() -> None:
    header = read(head(2) + tensor("a", offset=256) + tensor("b") + DATA)
    assert header.offsets == (256, 0)


def test_offsets_need_not_be_in_a_file_without_tensors() -> None:
    assert read(head()).tensors == {}


def test_scalar_tensor_has_no_dimensions() -> None:
    assert read(head(1) + tensor(dims=()) + DATA).tensors["t"] == TensorInfo("t", (), types.F32)


def message_of(data: bytes) -> str | None:
    """What reading says about `data`, None if it succeeds; anything but a ToolkitError passes through."""
    try:
        read(data)
    except ToolkitError as error:
        return str(error)
    return None


def test_any_change_of_a_header_reads_or_is_a_named_error_at_once() -> None:
    layout = FileLayout.of(METADATA, TENSORS)
    valid = layout.header.ljust(layout.total_bytes, b"\0")
    rng = np.random.default_rng(1)
    interesting = [0, 1, 0x7F, 0x80, 0xFF]
    _, usual = count_steps(lambda: read(valid))
    n_read = 0
    for _ in range(1000):
        data = bytearray(valid[: rng.integers(1, len(valid))] if rng.random() < 0.1 else valid)
        for _ in range(rng.integers(1, 4)):
            where = rng.integers(len(data[: layout.data_start]))
            width = int(rng.choice([1, 4, 8]))
            data[where : where + width] = bytes([int(rng.choice(interesting))]) * width
        message, steps = count_steps(partial(message_of, bytes(data)))
        n_read += message is None
        assert message is None or "\n" not in message
        assert steps["line"] < 2 * usual["line"]
    assert n_read, "some changes are harmless"


def test_vocabulary_is_decoded_fast() -> None:
    metadata = {"tokens": Value.strings(f"token {i} 深" for i in range(129_280))}
    raw = encode_header(metadata, [], [])
    header, steps = count_steps(lambda: decode_header(raw, "f"))
    assert header.metadata == metadata
    assert steps["call"] < 129_280 // 100, "no call for each string"
    assert steps["line"] < 129_280 * 12


# --- what can't be written ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (Value.u8(256), "key 'k': can't be written as uint8"),
        (Value.u32(-1), "key 'k': can't be written as uint32"),
        (Value(Kind.INT32, "7"), "can't be written as int32"),
        (Value(Kind.STRING, "\ud83d"), "can't be written as string"),
        (Value.i32s([2**31]), "can't be written as array of int32"),
        (Value.array(Kind.ARRAY, [Value.u8(1)]), "holds something that is not an array"),
    ],
)
def test_value_that_does_not_fit_is_named(value: Value, message: str) -> None:
    with pytest.raises(FormatError, match=message):
        encode_header({"k": value}, [], [])


@pytest.mark.parametrize(
    ("info", "message"),
    [
        (TensorInfo("x" * 64, (4,), types.F32), "64 bytes, expected at most 63"),
        (TensorInfo("t", (1, 1, 1, 1, 4), types.F32), "at most 4 dimensions"),
        (TensorInfo("t", (0, 4), types.F32), "of 1 or more"),
        (TensorInfo("t", (-1, 4), types.F32), "of 1 or more"),
    ],
)
def test_tensor_that_does_not_fit_is_named(info: TensorInfo, message: str) -> None:
    with pytest.raises(FormatError, match=message):
        encode_header({}, [info], [0])


def test_version_1_is_not_written() -> None:
    with pytest.raises(FormatError, match="version 1"):
        encode_header({}, [], [], version=1)
