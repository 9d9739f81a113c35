"""Folders that runs fill, empty and remove: only those that carry our mark, and of their files only ours."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forward.file_record import MARK, is_marked
from gguf_tools.errors import BadRequest, OutputError
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
        """Return whether a folder carries the mark."""
        return is_marked(folder, self.kind) or self.read_about(folder) is not None

    def read_about(self, folder: Path) -> dict[str, Any] | None:
        """Return what the JSON file says; None where it is missing, damaged or somebody else's."""
        try:
            data = json.loads((folder / self.about).read_bytes())
        except (OSError, ValueError, RecursionError):
            return None
        return data if isinstance(data, dict) and self.mark.items() <= data.items() else None

    def refuse_foreign(self, folder: Path) -> None:
        """Raise BadRequest for a folder that holds something, and not our mark.

        A run that was killed before it set the mark leaves empty files, and a lock where there are none.
        """
        if self.is_ours(folder):
            return
        for path in files_of(folder):
            if path.name.endswith(LOCK_SUFFIX) and self.names.fullmatch(path.name[: -len(LOCK_SUFFIX)]):
                continue
            if not (self.names.fullmatch(path.name) and path.is_file() and path.stat().st_size == 0):
                raise BadRequest(
                    f"{folder}: holds {path.name!r} and was not made by this command, expected an empty"
                    " folder or none; move it away, or name another one"
                )


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
