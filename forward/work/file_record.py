"""Which files a run has finished, with the size and a digest of each: one line of `record` for several files.

A line is written when its files are on the disk, and it is on the disk itself before the run relies on it. So
after a crash of the machine, a file that is not as its line says has lost something, and is made again.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from gguf_tools.errors import OutputError
from gguf_tools.files.line_log import LineLog, line_of, whole_lines
from gguf_tools.system import files
from gguf_tools.system.files import open_own, read_own

RECORD = "record"

MARK = "made by gguf-tools"
"""Key of the first line. A folder with such a line may be filled, emptied and removed."""

_BLOCK_BYTES = 4 << 20

Seal = list[Any]
"""Size of a file in bytes, and its digest, as JSON has them."""


@dataclass(frozen=True)
class Entry:
    """A line.

    what   what was finished, as JSON data
    files  name -> size and digest
    """

    what: Any
    files: Mapping[str, Seal]


class FileRecord:
    """The open record of a folder, which nobody else has open.

    entries  all lines but the mark, in their order
    is_torn  whether lines were lost that had been there
    raises   OutputError when it can't be read and written, or is a link
    """

    def __init__(self, folder: Path, kind: str) -> None:
        self._folder, self._kind = folder, kind
        self._log = LineLog(folder / RECORD)
        self.is_torn = self._log.is_torn
        self.entries: list[Entry] = []
        self._known: dict[str, Seal | None] = {}
        if not _has_mark(self._log.lines, kind):
            self.forget()
            return
        self.entries = [Entry(line["what"], line["files"]) for line in self._log.lines[1:]]

    def close(self) -> None:
        self._log.close()

    def add(self, what: Any, names: Iterable[str]) -> None:
        """Note that files are finished; they must be on the disk already.

        raises  OutputError for a file that can't be read
        """
        sealed = {name: self._seal(name) for name in names}
        if not sealed.keys() <= {name for entry in self.entries for name in entry.files}:
            self._sync_folder()
        self._known |= sealed
        self.entries.append(Entry(what, sealed))
        self._log.append({"what": what, "files": sealed})
        self._log.sync()

    def fits(self, name: str, seal: Seal) -> bool:
        """Compare a file with its line; it is read once."""
        if name not in self._known:
            self._known[name] = seal_of(self._folder / name)
        return self._known[name] == seal

    def forget(self) -> None:
        """Begin the record anew."""
        self.entries = []
        self._known = {}
        self._log.clear()
        self._log.append({MARK: self._kind})
        self._log.sync()
        self._sync_folder()

    def _seal(self, name: str) -> Seal:
        seal = seal_of(self._folder / name)
        if seal is None:
            raise OutputError(f"{self._folder / name}: can't be read; was it removed meanwhile?")
        return seal

    def _sync_folder(self) -> None:
        try:
            files.sync_folder(self._folder)
        except OSError as error:
            raise OutputError(f"{self._folder}: can't be written ({error.strerror})") from error


def is_marked(folder: Path, kind: str) -> bool:
    """Tell whether a folder has a record of that kind."""
    try:
        start = read_own(folder / RECORD, 1 << 10)
    except OSError:
        return False
    return _has_mark(whole_lines(start[: start.find(b"\n") + 1])[0], kind)


def begins_mark(path: Path, kind: str) -> bool:
    """Tell whether a file is the beginning of a record of that kind, and has nothing but its mark."""
    try:
        return line_of({MARK: kind}).startswith(read_own(path, 1 << 10))
    except OSError:
        return False


def seal_of(path: Path) -> Seal | None:
    """Return the size and the digest of a file; None for what can't be read, or is a link."""
    try:
        fd = open_own(path, os.O_RDONLY)
    except OSError:
        return None
    digest, buffer, n_bytes = xxhash.xxh3_128(), memoryview(bytearray(_BLOCK_BYTES)), 0
    try:
        while count := files.read_into(fd, buffer, n_bytes):
            digest.update(buffer[:count])
            n_bytes += count
    except OSError:
        return None
    finally:
        os.close(fd)
    return [n_bytes, digest.hexdigest()]


def _has_mark(lines: list[Any], kind: str) -> bool:
    return bool(lines) and lines[0] == {MARK: kind}
