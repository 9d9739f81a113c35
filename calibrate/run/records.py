"""Records of what was made, in the work folder: a line each, so that a run that goes on has them all.

A record is written before the journal says that its chunks are done. So a chunk that is done has its record,
and rows that are made again get a second one, which counts. Records that a crash of the machine has damaged
are left out: the bytes of the output do not depend on them, only the report and --verify do.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gguf_tools.files.line_log import LineLog


@dataclass(frozen=True)
class Record:
    """How some rows of a tensor came out.

    first, n_rows  the rows, counted through the tensor's matrices
    n_cols         columns of the rows
    n_seen         tokens that they were seen to multiply
    has_factor     whether the second moments of what they multiply could be used
    error          squared error on held-out rows
    stock_error    the same of the stock encoder's bytes
    is_stock       whether stock's bytes were kept
    """

    tensor: str
    first: int
    n_rows: int
    n_cols: int
    n_seen: int
    has_factor: bool
    error: float
    stock_error: float
    is_stock: bool


class Records:
    """The records of a run.

    parts   by tensor and first row
    chunks  digests of the bytes of chunks, by number
    """

    def __init__(self, path: Path, run: str, *, expected: bool = False) -> None:
        """Open the records of a run; those of another one are removed.

        expected  whether there are some, unless they were lost
        """
        self.parts: dict[tuple[str, int], Record] = {}
        self.chunks: dict[int, int] = {}
        self._log = LineLog(path)
        if self._log.is_torn or (expected and not self._log.lines):
            line = f"{path}: missing, or not as it was written; the report leaves out what is lost"
            print(line, file=sys.stderr, flush=True)
        if self._log.lines[:1] == [{"run": run}]:
            for line in self._log.lines[1:]:
                self._take(line)
        else:
            self._log.clear()
            self._append({"run": run})

    def close(self) -> None:
        self._log.close()

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
        self._log.append(data)
