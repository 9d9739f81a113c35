"""Findings of `gguf-tools verify` in a file that can be opened, and the SHA-256 of `gguf-tools hash`.

Opening a file refuses a header that contradicts itself (see header.py). What remains are data that would make
a model compute nonsense, and things that llama.cpp refuses although the file is readable.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gguf_tools.findings import Finding, Level
from gguf_tools.format.block_layouts import SCALES, count_nonfinite
from gguf_tools.format.header import MAX_NAME_BYTES, align_up
from gguf_tools.format.reader import GGUFFile, GGUFSource
from gguf_tools.format.tensors import CHUNK_BYTES, TensorInfo, row_chunks
from gguf_tools.format.values import bytes_of
from gguf_tools.progress import NO_REPORT, Reporter
from gguf_tools.text import counted, printable

KIND = "data"


def as_json(finding: Finding) -> dict[str, Any]:
    return {
        "file": finding.file, "tensor": finding.where, "text": finding.text, "bad": finding.is_bad,
    }  # fmt: skip


def as_text(finding: Finding) -> str:
    """Return the finding on one line."""
    where = f"{finding.file}: {printable(finding.where)}" if finding.where else finding.file
    return f"{where}: {finding.text}" if finding.is_bad else f"{where}: note: {finding.text}"


@dataclass(frozen=True)
class Verification:
    """Findings of a check of all of a file.

    path       as given
    n_tensors  how many tensors it has
    findings   what is wrong or worth knowing, in the order of the file
    """

    path: Path
    n_tensors: int
    findings: tuple[Finding, ...]

    @property
    def bad(self) -> list[Finding]:
        """The findings of what is wrong."""
        return [finding for finding in self.findings if finding.is_bad]

    def to_json(self) -> dict[str, Any]:
        """Return everything as plain data."""
        findings = [as_json(finding) for finding in self.findings]
        return {"ok": not self.bad, "tensors": self.n_tensors, "findings": findings}

    def lines(self) -> list[str]:
        """Return the findings as text, and a line that sums up."""
        found = counted(len(self.bad), "bad finding") if self.bad else "all good"
        summary = f"{self.path}: {counted(self.n_tensors, 'tensor')}, {found}"
        return [*map(as_text, self.findings), summary]


def verify(source: GGUFSource, progress: Reporter = NO_REPORT) -> list[Finding]:
    """Check all of a file or split set; return what is wrong or worth knowing.

    progress  counts the bytes that are read
    """
    findings: list[Finding] = []
    progress.start(sum(info.n_bytes for info in source.tensors.values()), 0)
    files = {source.file_of(name) for name in source.tensors}
    for file in sorted(files, key=lambda file: file.path):
        findings += _check_places(file)
    for info in source.tensors.values():
        findings += _check_tensor(source.file_of(info.name), info)
        progress.advance(info.n_bytes)
    return findings


def _check_places(file: GGUFFile) -> list[Finding]:
    """Check that data are in order and without gaps, as llama.cpp wants them, with no bytes left over."""
    name = str(file.path)
    findings = []
    expected = file.data_start
    for info in file.tensors.values():
        offset = file.data_offset(info.name)
        if offset != expected:
            text = f"data at byte {offset}, llama.cpp expects them at {expected}"
            findings.append(Finding(KIND, text, Level.BAD, (info.name,), name))
        expected = align_up(offset + info.n_bytes - file.data_start, file.alignment) + file.data_start
        if len(bytes_of(info.name)) > MAX_NAME_BYTES:
            text = f"name longer than {MAX_NAME_BYTES} bytes, llama.cpp refuses it"
            findings.append(Finding(KIND, text, Level.BAD, (info.name,), name))
    if file.size_bytes > expected:
        text = f"{file.size_bytes - expected} bytes behind the last tensor belong to nothing"
        findings.append(Finding(KIND, text, Level.NOTE, file=name))
    return findings


def _check_tensor(file: GGUFFile, info: TensorInfo) -> list[Finding]:
    """Check floats, and the scales of blocks, for NaN and infinity."""
    n_bad, first_row = 0, -1
    if info.n_rows % info.type.rows_interleaved:
        text = f"{info.n_rows} rows, but {info.type.name} keeps {info.type.rows_interleaved} together"
        return [Finding(KIND, text, Level.BAD, (info.name,), str(file.path))]
    for start, stop in row_chunks(info):
        rows = file.read_rows(info.name, start, stop)
        count, row = count_nonfinite(info.type, rows, info.row_bytes, file.endian)
        if count and not n_bad:
            first_row = start + row
        n_bad += count
    if n_bad:
        what = "scales" if info.type.is_quantized else "weights"
        text = f"{n_bad:,} {info.type.name} {what} are NaN or infinite, the first in row {first_row}"
        return [Finding(KIND, text, Level.BAD, (info.name,), str(file.path))]
    if info.type.is_quantized and info.type.name not in SCALES:
        text = f"scales of {info.type.name} are not checked"
        return [Finding(KIND, text, Level.NOTE, (info.name,), str(file.path))]
    return []


@dataclass(frozen=True)
class Hashes:
    """Hexadecimal SHA-256.

    tensors  by tensor name, in file order
    files    by path, in order of shards
    content  of each tensor's name, type, shape and data in order of names: the same for one file and for a
             split set, whatever the metadata and the order of tensors
    """

    tensors: dict[str, str]
    files: dict[str, str]
    content: str

    def as_json(self) -> dict[str, Any]:
        return {"tensors": self.tensors, "files": self.files, "content": self.content}


def hash_tensor(source: GGUFSource, name: str) -> str:
    """Return the SHA-256 of a tensor's data, without padding."""
    digest = hashlib.sha256()
    for start in range(0, source.tensors[name].n_bytes, CHUNK_BYTES):
        digest.update(source.read_bytes(name, start, start + CHUNK_BYTES).data)
    return digest.hexdigest()


def hash_source(source: GGUFSource) -> Hashes:
    """Hash all tensors and all files of `source`."""
    tensors = {name: hash_tensor(source, name) for name in source.tensors}
    content = hashlib.sha256()
    for name in sorted(tensors, key=bytes_of):
        info = source.tensors[name]
        content.update(b"%s\0%s\0" % (bytes_of(name), info.type.name.encode()))
        content.update(b"%s\0%s\n" % ("x".join(map(str, info.shape)).encode(), tensors[name].encode()))
    return Hashes(tensors, {str(path): _hash_file(path) for path in source.paths}, content.hexdigest())


def _hash_file(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb", buffering=0) as stream:
        while chunk := stream.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()
