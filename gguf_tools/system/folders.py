"""Open folders, in which names stand for what is there and never for what a link leads to.

A path may lead elsewhere at any time: somebody replaces a folder of it by a link. A folder that is open stays
the same one. So what is removed is opened step by step from a folder that the user named, and by names in it.
Windows has no such calls; there paths are looked at first.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gguf_tools.system.files import open_own, read_at

_BY_FD = {os.open, os.stat, os.unlink, os.rmdir} <= os.supports_dir_fd and os.scandir in os.supports_fd


@dataclass(frozen=True)
class OpenFolder:
    """An open folder.

    path  by which it was opened, for messages
    fd    its descriptor; -1 where a system has none
    """

    path: Path
    fd: int

    def entries(self) -> list[os.DirEntry[str]]:
        """Return the entries of the folder, in order; raises OSError."""
        with os.scandir(self.fd if _BY_FD else self.path) as found:
            return sorted(found, key=lambda each: each.name)

    def open_own(self, name: str, flags: int) -> int:
        """Open a file of ours, see `gguf_tools.system.files.open_own`; raises OSError."""
        return open_own(**self._named(name), flags=flags)

    def start_of(self, name: str, n_bytes: int) -> bytes:
        """Return the start of a file of ours; b"" for what can't be read, or is a link."""
        try:
            fd = self.open_own(name, os.O_RDONLY)
        except OSError:
            return b""
        try:
            return read_at(fd, n_bytes, 0)
        except OSError:
            return b""
        finally:
            os.close(fd)

    def has(self, name: str, fd: int) -> bool:
        """Whether an open file still has a name here."""
        try:
            return os.path.samestat(os.fstat(fd), os.stat(**self._named(name), follow_symlinks=False))
        except OSError:
            return False

    def size(self, name: str) -> int:
        """Return the bytes of a file; 0 for one that is gone."""
        try:
            return os.stat(**self._named(name), follow_symlinks=False).st_size
        except OSError:
            return 0

    def remove(self, name: str) -> None:
        """Remove a name that is not a folder's; raises OSError."""
        os.unlink(**self._named(name))

    def remove_folder(self, name: str) -> None:
        """Remove an empty folder; raises OSError."""
        os.rmdir(**self._named(name))

    @contextmanager
    def inner(self, name: str) -> Iterator[OpenFolder]:
        """Give a folder in it, for the time of this block; raises OSError, also for a link."""
        folder = self._step(name)
        try:
            yield folder
        finally:
            folder._close()

    def _step(self, name: str) -> OpenFolder:
        path = self.path / name
        if _BY_FD:
            flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
            return OpenFolder(path, os.open(name, flags, dir_fd=self.fd))
        if not stat.S_ISDIR(path.lstat().st_mode):
            raise NotADirectoryError(path)
        return OpenFolder(path, -1)

    def _close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)

    def _named(self, name: str) -> dict[str, Any]:
        return {"path": name, "dir_fd": self.fd} if _BY_FD else {"path": self.path / name}


@contextmanager
def opened(path: Path, steps: Iterable[str] = ()) -> Iterator[OpenFolder]:
    """Give the folder at `path`, which may be a link, or by steps one in it; raises OSError for a link."""
    folder = OpenFolder(path, os.open(path, os.O_RDONLY | os.O_DIRECTORY) if _BY_FD else -1)
    try:
        for name in steps:
            outer, folder = folder, folder._step(name)
            outer._close()
        yield folder
    finally:
        folder._close()
