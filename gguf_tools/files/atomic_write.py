"""Files written whole: what has the name is complete, whatever interrupts the writing.

A file grows under a name of its own, NAME.1f2e...8a9b.partial, which no link can stand for: eight random
digits and sixteen that are a digest of these and of NAME. No other program makes such a name. The next file
of NAME removes what killed processes have left.
"""

from __future__ import annotations

import os
import re
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from hashlib import blake2b
from pathlib import Path
from typing import IO

from gguf_tools.errors import OutputError
from gguf_tools.files.named_files import output_path
from gguf_tools.system import files
from gguf_tools.system.files import is_at, open_own
from gguf_tools.system.lock_files import NO_LOCKS
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
    output_path(path)
    try:
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
        partial = path.with_name(small_partial(path.name))
        fd = open_own(partial, os.O_RDWR | os.O_CREAT | os.O_EXCL, permissions)
        try:
            try_lock(fd)
            is_ours = is_at(fd, partial)
        except OSError as error:  # another process takes it for left, or the file system has no locks
            is_ours = error.errno in NO_LOCKS
        if is_ours:
            return partial, fd
        os.close(fd)
        with suppress(OSError):  # who only looked at it leaves it
            partial.unlink()


_SMALL_PARTIAL = re.compile(r"(.+)\.([0-9a-f]{8})([0-9a-f]{16})\.partial", re.DOTALL)


def small_partial(name: str) -> str:
    """Return another name under which a file can grow."""
    token = secrets.token_hex(4)
    return f"{name}.{token}{_check(name, token)}.partial"


def output_of_small_partial(name: str) -> str | None:
    """Return the name of the file that is written under another name; None for somebody else's."""
    found = _SMALL_PARTIAL.fullmatch(name)
    return found[1] if found is not None and found[3] == _check(found[1], found[2]) else None


def _check(name: str, token: str) -> str:
    return blake2b(f"gguf-tools {token} {name}".encode(errors="surrogateescape"), digest_size=8).hexdigest()


def remove_leftovers(path: Path) -> None:
    """Remove what killed processes have left of writing `path`: files with a name of ours that none holds."""
    with suppress(OSError), os.scandir(path.parent) as entries:
        for entry in entries:
            if output_of_small_partial(entry.name) == path.name:
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
