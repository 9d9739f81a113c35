"""Arrays by name in a file of a work folder."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import IO

import numpy as np

from forward.observe import Arrays
from gguf_tools.errors import OutputError
from gguf_tools.system.own_files import open_own


def write_whole_of(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Have `write` fill a file anew, and bring it to the disk.

    raises  OutputError when it can't be written, or is a link
    """
    try:
        with os.fdopen(open_own(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise OutputError(f"{path}: can't be written ({error.strerror})") from error


def save_arrays(path: Path, arrays: Arrays) -> None:
    """Write arrays to a file, and bring it to the disk; raises OutputError."""
    write_whole_of(path, lambda file: np.savez(file, **arrays))  # type: ignore[arg-type]


def load_arrays(path: Path) -> Arrays:
    """Return the arrays of a file that was whole when the run began.

    raises  OutputError for a file that another program has changed meanwhile
    """
    try:
        with np.load(path) as stored:
            return dict(stored)
    except Exception as error:  # numpy and zipfile raise all sorts
        raise OutputError(f"{path}: can't be read ({error}); was it changed meanwhile?") from error
