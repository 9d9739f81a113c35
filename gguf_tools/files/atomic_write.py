"""Files written whole: what has the name is complete, whatever interrupts the writing.

A file grows under a name of its own, NAME.1f2e3d4c.partial, which nobody else has and which no link can stand
for. The next file of that name removes what killed processes have left.
"""

from __future__ import annotations

import os
import re
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from gguf_tools.errors import OutputError
from gguf_tools.files.named_files import output_path
from gguf_tools.system import files
from gguf_tools.system.files import open_own
from gguf_tools.system.locks import try_lock

_START_BYTES = 4096


def write_whole(path: Path, data: bytes) -> None:
    """Write `data` to a file beside `path`, which then takes its name.

    raises  OutputError when it can't be written, or when text would replace a file that is no text, such as
            a model; what had the name keeps it
    """
    if b"\0" not in data[:_START_BYTES]:
        refuse_binary(path)
    with whole_file(path) as file:
        file.write(data)


@contextmanager
def whole_file(path: Path, permissions: int = 0o666) -> Iterator[IO[bytes]]:
    """Give a file to write and read, which takes the name `path` when the `with` block ends without an error.

    permissions  mode bits of the file, less those of the umask
    raises       OutputError when it can't be written; what had the name keeps it
    """
    try:
        output_path(path)
        remove_leftovers(path)
        partial, fd = _begin(path, permissions)
        try:
            with os.fdopen(fd, "w+b") as file:
                yield file
                file.flush()
                files.sync(fd)
                if not files.IS_HELD_OPEN:
                    files.rename(partial, path)
            if files.IS_HELD_OPEN:
                files.rename(partial, path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
        files.sync_folder(path.parent)
    except OSError as error:
        raise OutputError(f"{path}: can't be written ({error.strerror})") from error


def _begin(path: Path, permissions: int) -> tuple[Path, int]:
    """Return a new file beside `path`, and its descriptor; it is locked where the file system has locks."""
    while True:
        partial = path.with_name(f"{path.name}.{secrets.token_hex(4)}.partial")
        fd = open_own(partial, os.O_RDWR | os.O_CREAT | os.O_EXCL, permissions)
        with suppress(OSError):  # it fails where another process is removing the file, or without locks
            try_lock(fd)
        if partial.exists():
            return partial, fd
        os.close(fd)


def remove_leftovers(path: Path) -> None:
    """Remove what killed processes have left of writing `path`: files with a name of ours that none holds."""
    ours = re.compile(re.escape(path.name) + r"\.[0-9a-f]{8}\.partial")
    with suppress(OSError), os.scandir(path.parent) as entries:
        for entry in entries:
            if ours.fullmatch(entry.name):
                _remove_if_free(Path(entry.path))


def _remove_if_free(partial: Path) -> None:
    with suppress(OSError):
        fd = open_own(partial, os.O_RDWR)
        try:
            try_lock(fd)  # who writes it holds this lock
            if not files.IS_HELD_OPEN:
                partial.unlink()
        finally:
            os.close(fd)
        if files.IS_HELD_OPEN:
            partial.unlink()


def refuse_binary(path: Path) -> None:
    """Raise OutputError if `path` is a file that is no text, which a text would replace."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            return
        with path.open("rb") as file:
            start = file.read(_START_BYTES)
    except OSError:
        return
    if b"\0" in start:
        what = "a GGUF file" if start.startswith(b"GGUF") else "no text"
        raise OutputError(f"{path}: is {what}, and a text would replace it; write somewhere else")
