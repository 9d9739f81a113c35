"""Records of what was made, in the work folder: a line of JSON each, so that a run that goes on has them all.

A record is written before the journal says that its chunks are done. So a chunk that is done has its record,
and rows that are made again get a second one, which counts.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gguf_tools.errors import OutputError
from gguf_tools.system.files import open_file


@dataclass(frozen=True)
class Record:
    """How some rows of a tensor came out.

    first, n_rows  the rows, counted through the tensor's matrices
    n_cols         columns of the rows
    n_seen         tokens that they were seen to multiply
    has_factor     whether the second moments of what they multiply could be used
    loss           squared error on rows that were held back
    stock_loss     the same of stock's encoding
    is_stock       whether stock's bytes were kept
    """

    tensor: str
    first: int
    n_rows: int
    n_cols: int
    n_seen: int
    has_factor: bool
    loss: float
    stock_loss: float
    is_stock: bool


class Records:
    """The records of a run.

    parts   by tensor and first row
    chunks  digests of the bytes of chunks, by number
    """

    def __init__(self, path: Path) -> None:
        self.parts: dict[tuple[str, int], Record] = {}
        self.chunks: dict[int, int] = {}
        self._path = path
        for line in _whole_lines(path):
            self._take(json.loads(line))
        try:
            self._fd = open_file(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        except OSError as error:
            raise OutputError(f"{path}: can't be written ({error.strerror})") from error

    def close(self) -> None:
        os.close(self._fd)

    def add(self, record: Record) -> None:
        self.parts[record.tensor, record.first] = record
        self._append({"part": asdict(record)})

    def add_chunk(self, number: int, digest: int) -> None:
        self.chunks[number] = digest
        self._append({"chunk": number, "digest": digest})

    def take_over(self, other: Records) -> None:
        """Add all records of another run."""
        for record in other.parts.values():
            self.add(record)
        for number, digest in other.chunks.items():
            self.add_chunk(number, digest)

    def of(self, tensors: Iterable[str]) -> list[Record]:
        """Return the records of some tensors."""
        wanted = set(tensors)
        return [record for record in self.parts.values() if record.tensor in wanted]

    def _take(self, data: dict[str, Any]) -> None:
        if "part" in data:
            record = Record(**data["part"])
            self.parts[record.tensor, record.first] = record
        else:
            self.chunks[data["chunk"]] = data["digest"]

    def _append(self, data: dict[str, Any]) -> None:
        try:
            os.write(self._fd, json.dumps(data).encode() + b"\n")
        except OSError as error:
            raise OutputError(f"{self._path}: can't be written ({error.strerror})") from error


def _whole_lines(path: Path) -> list[bytes]:
    """Return the lines of a file, and cut off what a failing disk has left of another."""
    if not path.exists():
        return []
    data = path.read_bytes()
    n_whole = data.rfind(b"\n") + 1
    if n_whole < len(data):
        os.truncate(path, n_whole)
    return data[:n_whole].splitlines()
