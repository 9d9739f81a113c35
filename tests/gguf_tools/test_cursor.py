"""Headers are read a piece at a time: wherever a piece ends, the same comes out."""

from __future__ import annotations

import pytest

from gguf_tools import Kind, Value
from gguf_tools.errors import FormatError, TruncatedError
from gguf_tools.format import header
from gguf_tools.format.header import encode_header, read_header
from tests.gguf_tools.sample_files import METADATA, TENSORS, decode_header

LONG = {
    "numbers": Value.array(Kind.UINT32, range(1000)),
    "texts": Value.strings("é" * (index % 50) + "x" for index in range(500)),
    "text": Value.string("long " * 1000),
}
HEADER = encode_header(METADATA | LONG, TENSORS, [0] * len(TENSORS))


@pytest.mark.parametrize("at_once", [1, 7, 8, 64, 1000, 1 << 18])
def test_any_piece_size_reads_the_same(monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    monkeypatch.setattr(header, "READ_AT_ONCE", at_once)
    found = decode_header(HEADER, "f")
    assert found.metadata == METADATA | LONG
    assert tuple(found.tensors.values()) == TENSORS
    assert found.n_bytes == len(HEADER)


def test_no_more_is_read_than_the_header_and_one_piece() -> None:
    last = 0

    def read(offset: int, n_bytes: int) -> bytes:
        nonlocal last
        last = max(last, offset + n_bytes)
        return HEADER[offset : offset + n_bytes].ljust(n_bytes, b"\0")

    read_header(read, 1 << 40, "f")
    assert last <= len(HEADER) + header.READ_AT_ONCE


@pytest.mark.parametrize("at_once", [1, 64, 1 << 18])
def test_a_file_that_became_shorter_is_named(monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    monkeypatch.setattr(header, "READ_AT_ONCE", at_once)
    cut = HEADER[:3000]
    with pytest.raises(TruncatedError, match=f"^f: ends at byte 3000, had {len(HEADER)} bytes"):
        read_header(lambda offset, n_bytes: cut[offset : offset + n_bytes], len(HEADER), "f")


def test_memory_is_counted_over_the_whole_header(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each value alone would fit."""
    numbers = {str(index): Value.u8s(range(200)) for index in range(20)}
    raw = encode_header(numbers, [], [])
    monkeypatch.setattr(header, "MAX_MEMORY", 20_000 + 20 * 800)
    with pytest.raises(FormatError, match="key '8', an array of 200 uint8, would take more than"):
        decode_header(raw, "f")
    monkeypatch.setattr(header, "MAX_MEMORY", 20 * (800 + 200 * 12 + 4))
    assert decode_header(raw, "f").metadata == numbers
