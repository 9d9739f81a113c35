"""Folders that runs fill, empty and remove: only those that carry our mark, and of their files only ours.

Files are written as a whole and brought to the disk; arrays go into them by name.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from forward.observe import Arrays
from forward.work.file_record import MARK, RECORD, begins_mark, is_marked
from gguf_tools.errors import BadRequest, OutputError
from gguf_tools.system.files import open_own, read_own
from gguf_tools.system.lock_files import LOCK_SUFFIX


@dataclass(frozen=True)
class FolderKind:
    """A kind of folder. Its mark is in `record` and in another file, so damage to one of them is survived.

    kind   what the mark says
    about  name of a JSON file that has the mark, too
    names  of the files that we make there
    """

    kind: str
    about: str
    names: re.Pattern[str]

    @property
    def mark(self) -> dict[str, str]:
        """What the JSON file has, beside other things."""
        return {MARK: self.kind}

    def is_ours(self, folder: Path) -> bool:
        """Tell whether a folder carries the mark."""
        return is_marked(folder, self.kind) or self.read_about(folder) is not None

    def read_about(self, folder: Path) -> dict[str, Any] | None:
        """Read the JSON file; None where it is missing, damaged or somebody else's."""
        try:
            data = json.loads(read_own(folder / self.about))
        except (OSError, ValueError, RecursionError):
            return None
        return data if isinstance(data, dict) and self.mark.items() <= data.items() else None

    def refuse_foreign(self, folder: Path) -> None:
        """Raise BadRequest for a folder that holds something, and not our mark.

        A run that was killed, or whose disk was full, before it had set the mark leaves empty files, the
        beginning of the mark, and a lock where there are none.
        """
        if self.is_ours(folder):
            return
        for path in files_of(folder):
            if not self._may_be_left(path):
                raise BadRequest(
                    f"{folder}: holds {path.name!r} and was not made by this command, expected an empty"
                    " folder or none; move it away, or name another one"
                )


    def _may_be_left(self, path: Path) -> bool:
        """Tell whether a file may have been left by a run that had not set the mark yet."""
        if path.name.endswith(LOCK_SUFFIX) and self.names.fullmatch(path.name[: -len(LOCK_SUFFIX)]):
            return True
        if path.name == RECORD:
            return begins_mark(path, self.kind)
        return bool(self.names.fullmatch(path.name)) and path.is_file() and path.stat().st_size == 0


def files_of(folder: Path) -> Iterator[Path]:
    """Yield what is in a folder, in order; raises OutputError."""
    try:
        yield from sorted(folder.iterdir())
    except OSError as error:
        raise OutputError(f"{folder}: can't be read ({error.strerror})") from error


def remove_files(folder: Path, names: re.Pattern[str], but: str = "") -> None:
    """Remove files with such names, and of links the links alone; raises OutputError."""
    for path in files_of(folder):
        if names.fullmatch(path.name) and path.name != but and (path.is_symlink() or not path.is_dir()):
            try:
                path.unlink()
            except OSError as error:
                raise OutputError(f"{path}: can't be removed ({error.strerror})") from error


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
