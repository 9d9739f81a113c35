"""Lines of JSON that are appended to a file one by one; each begins with a digest of the rest.

    0f3a...  {"layer": 3, ...}

A line that does not fit its digest ends the log, wherever it is: what stands behind it may be older than what
was lost. A kill leaves half a line at the end, a crash of the machine zeros, or fewer lines.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import xxhash

from gguf_tools.errors import OutputError
from gguf_tools.system import files
from gguf_tools.system.files import open_own


class LineLog:
    """An open log.

    lines    what was in it when it was opened
    is_torn  whether more was in it than whole lines, and more than a kill leaves
    raises   OutputError when it can't be read and written, or is a link
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._fd = open_own(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
            try:
                data = files.read_at(self._fd, os.fstat(self._fd).st_size, 0)
                self.lines, n_whole = whole_lines(data)
                self.is_torn = b"\n" in data[n_whole:] or b"\0" in data[n_whole:]
                os.ftruncate(self._fd, n_whole)
            except BaseException:
                os.close(self._fd)
                raise
        except OSError as error:
            raise self._unwritable(error) from error

    def close(self) -> None:
        os.close(self._fd)

    def append(self, data: Any) -> None:
        """Add a line; raises OutputError."""
        try:
            files.append_all(self._fd, line_of(data))
        except OSError as error:
            raise self._unwritable(error) from error

    def sync(self) -> None:
        """See to it that all lines are on the disk itself; raises OutputError."""
        try:
            files.sync_data(self._fd)
        except OSError as error:
            raise self._unwritable(error) from error

    def clear(self) -> None:
        """Remove all lines; raises OutputError."""
        try:
            os.ftruncate(self._fd, 0)
        except OSError as error:
            raise self._unwritable(error) from error

    def _unwritable(self, error: OSError) -> OutputError:
        return OutputError(f"{self._path}: can't be written ({error.strerror})")


def line_of(data: Any) -> bytes:
    """Return a line, its end included."""
    text = json.dumps(data).encode()
    return f"{xxhash.xxh3_64_hexdigest(text)} ".encode() + text + b"\n"


def whole_lines(content: bytes) -> tuple[list[Any], int]:
    """Parse the lines up to the first damaged one; return them and how many bytes they take."""
    lines: list[Any] = []
    n_bytes = 0
    for line in content.splitlines(keepends=True):
        digest, _, text = line[:-1].partition(b" ")
        if line[-1:] != b"\n" or digest != xxhash.xxh3_64_hexdigest(text).encode():
            break
        lines.append(json.loads(text))
        n_bytes += len(line)
    return lines, n_bytes
