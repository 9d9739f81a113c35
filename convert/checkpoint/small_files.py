"""Reads the small files beside a checkpoint's weights, within bounds on their size.

A folder of unknown origin may hold a pipe where a file is expected (opening it would wait for ever), a link
to /dev/zero, or a file of gigabytes.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from gguf_tools.errors import CheckpointError
from gguf_tools.system.files import NO_WAIT, open_file


def read_small_file(path: Path, most: int, error: type[CheckpointError]) -> bytes:
    """Return the content of a file.

    raises  `error` when it is not a regular file, has more than `most` bytes, or can't be read
    """
    try:
        # Opening a pipe must not wait for a writer.
        with open(open_file(path, os.O_RDONLY | NO_WAIT), "rb", buffering=0) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise error(f"{path}: not a regular file")
            if status.st_size > most:
                raise error(f"{path}: {status.st_size} bytes, expected at most {most}")
            return b"".join(iter(lambda: file.read(most), b""))
    except OSError as cause:
        raise error(f"{path}: can't be read: {cause.strerror or cause}") from cause
    except ValueError as cause:  # a name with a character that no file name has
        raise error(f"{path}: can't be read: {cause}") from cause
