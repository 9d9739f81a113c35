"""Bytes that belong to nothing: after the header, between tensors, after the last tensor.

Programs skip them, so they can carry anything. Honest files have zeros there, fewer than the alignment.
Bytes that begin like another kind of file are named as such. A file that ends like a zip archive is an
archive to every program that opens archives, wherever its entries lie.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from operator import itemgetter

from gguf_tools.findings import Finding, Level, listed
from gguf_tools.format import keys
from gguf_tools.format.reader import GGUFFile
from gguf_tools.format.shards import SPLIT_KEYS
from gguf_tools.system.files import read_at
from gguf_tools.text import quoted

_CHUNK_BYTES = 16 << 20
_SEARCHED_BYTES = 4 << 20

# Long signatures are looked for anywhere, short ones only where the bytes begin.
_LONG_SIGNATURES = {
    b"PK\x03\x04": "a zip archive",
    b"\x7fELF": "an ELF program",
    b"\xfd7zXZ\x00": "xz data",
    b"7z\xbc\xaf\x27\x1c": "a 7z archive",
    b"Rar!\x1a\x07": "a rar archive",
    b"%PDF-": "a PDF",
    b"SQLite format 3\x00": "an SQLite database",
    b"\x89PNG\r\n\x1a\n": "a PNG image",
    b"This program cannot be run in DOS mode": "a Windows program",
}
_SHORT_SIGNATURES = {
    b"MZ": "a Windows program",
    b"\x1f\x8b\x08": "gzip data",
    b"BZh": "bzip2 data",
    b"\x28\xb5\x2f\xfd": "zstd data",
    b"\xcf\xfa\xed\xfe": "a Mach-O program",
    b"\xca\xfe\xba\xbe": "a Java class or Mach-O program",
    b"\x00asm": "WebAssembly",
    b"\x80\x02": "a Python pickle",
    b"\x80\x03": "a Python pickle",
    b"\x80\x04\x95": "a Python pickle",
    b"\x80\x05\x95": "a Python pickle",
    b"GGUF": "another GGUF file",
    b"#!": "a script",
    b"<?php": "a script",
    b"<script": "a script",
}
_ANY_LONG = re.compile(b"|".join(map(re.escape, _LONG_SIGNATURES)))
_SAFETENSORS = re.compile(rb'.{8}\{\s*"', re.DOTALL)
_ZIP_END = struct.Struct("<4s4H2LH")


@dataclass(frozen=True)
class Gap:
    """A range of a file outside of all tensors: bytes `start` to `stop`; `where` says what is around it."""

    start: int
    stop: int
    where: str


def check_hidden(files: Iterable[GGUFFile]) -> Iterator[Finding]:
    """Report bytes and keys that nothing reads, and archives, in each file of a model, in order."""
    for number, file in enumerate(files):
        name = file.path.name
        if number and (unread := sorted(file.metadata.keys() - {*SPLIT_KEYS, keys.ALIGNMENT})):
            text = f"holds metadata, which programs read from the first file only: {listed(unread)}"
            yield Finding("hidden-data", text, Level.WARNING, file=name)
        for gap in gaps_of(file):
            yield from _check_gap(file, name, gap)
        if entries := _zip_entries(file):
            text = f"the file is a zip archive too, of {entries:,} entries, to programs that open those"
            yield Finding("hidden-data", text, Level.BAD, file=name)


def gaps_of(file: GGUFFile) -> list[Gap]:
    """Return the ranges of `file` that belong neither to its header nor to a tensor, in order."""
    end, after = file.header_bytes, "the header"
    gaps = []
    for start, info in sorted(
        ((file.data_offset(name), info) for name, info in file.tensors.items()), key=itemgetter(0)
    ):
        gaps.append(Gap(end, start, f"between {after} and tensor {quoted(info.name)}"))
        end, after = start + info.n_bytes, f"tensor {quoted(info.name)}"
    gaps.append(Gap(end, file.size_bytes, f"behind {after}"))
    return [gap for gap in gaps if gap.start < gap.stop]


def _check_gap(file: GGUFFile, name: str, gap: Gap) -> Iterator[Finding]:
    n_bytes = gap.stop - gap.start
    first, n_used = _count_used(file, gap)
    if n_used:
        kind = _kind_of(file, gap, first)
        text = f"{n_used:,} of {n_bytes:,} bytes {gap.where} are not zero, from byte {first:,} on"
        level = Level.BAD if kind else Level.WARNING
        yield Finding("hidden-data", f"{text}; they look like {kind}" if kind else text, level, file=name)
    elif n_bytes >= file.alignment:
        text = f"{n_bytes:,} bytes {gap.where} belong to nothing; they are zero"
        yield Finding("unused-bytes", text, Level.NOTE, file=name)


def _count_used(file: GGUFFile, gap: Gap) -> tuple[int, int]:
    """Return the position of the first byte that isn't zero (-1 without one), and how many there are."""
    first, n_used = -1, 0
    for start in range(gap.start, gap.stop, _CHUNK_BYTES):
        chunk = read_at(file.fileno(), min(_CHUNK_BYTES, gap.stop - start), start)
        n_zeros = chunk.count(0)
        if first < 0 and n_zeros < len(chunk):
            first = start + len(chunk) - len(chunk.lstrip(b"\0"))
        n_used += len(chunk) - n_zeros
    return first, n_used


def _kind_of(file: GGUFFile, gap: Gap, first: int) -> str:
    """Name what the bytes of a gap look like, "" for nothing known."""
    for start in (gap.start, first):
        head = read_at(file.fileno(), min(64, gap.stop - start), start)
        for signature, kind in _SHORT_SIGNATURES.items():
            if head.startswith(signature):
                return kind
        if _SAFETENSORS.match(head):
            return "a safetensors file"
        if read_at(file.fileno(), 5, start + 257) == b"ustar" and start + 262 <= gap.stop:
            return "a tar archive"
    match = _ANY_LONG.search(read_at(file.fileno(), min(_SEARCHED_BYTES, gap.stop - first), first))
    return _LONG_SIGNATURES[match[0]] if match else ""


def _zip_entries(file: GGUFFile) -> int:
    """Return the number of entries of a zip archive that ends with the file; 0 without one."""
    start = max(file.size_bytes - _ZIP_END.size - 0xFFFF, 0)
    tail = read_at(file.fileno(), file.size_bytes - start, start)
    at = tail.rfind(b"PK\x05\x06")
    while at >= 0:
        if at + _ZIP_END.size <= len(tail):
            _, disk, first_disk, _, n_entries, n_bytes, _, n_comment = _ZIP_END.unpack_from(tail, at)
            ends_here = at + _ZIP_END.size + n_comment == len(tail)
            if ends_here and disk == first_disk == 0 and n_entries and n_bytes >= 46 * n_entries:
                return int(n_entries)
        at = tail.rfind(b"PK\x05\x06", 0, at)
    return 0
