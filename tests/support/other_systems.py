"""This process as it would be on another system: what that one lacks is taken away before the toolkit loads.

    python -c "from tests.support.other_systems import SYSTEMS; SYSTEMS['windows'](); ..."

Functions and modules go. What Windows refuses is refused here too: an open file is neither renamed nor
removed, and a rename replaces nothing. Its locks are played by locks of Linux that belong to a descriptor.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

_O_BINARY = 1 << 30
_LOCK = struct.Struct("hhqqi4x")

_ONLY_LINUX = (
    "fdatasync", "copy_file_range", "posix_fadvise", "posix_fallocate", "sched_getaffinity", "preadv",
    "pwritev",
)  # fmt: skip
_ONLY_POSIX = ("pread", "pwrite", "O_NONBLOCK", "O_DIRECTORY", "O_CLOEXEC", "fchmod", "statvfs")


def become_macos() -> list[str]:
    """Take away what macOS lacks; returns a list that grows with each full sync."""
    for name in _ONLY_LINUX:
        delattr(os, name)
    synced: list[str] = []
    whole: Callable[..., Any] = fcntl.fcntl

    def call(fd: int, code: int, *argument: Any) -> Any:
        if code != _F_FULLFSYNC:
            return whole(fd, code, *argument)
        synced.append(os.readlink(f"/proc/self/fd/{fd}"))
        os.fsync(fd)
        return 0

    fcntl.F_FULLFSYNC = _F_FULLFSYNC  # type: ignore[attr-defined]
    fcntl.fcntl = call
    return synced


_F_FULLFSYNC = 51


def become_windows() -> list[str]:
    """Take away what Windows lacks, and refuse what it refuses; returns a list that grows with each lock."""
    usage: Callable[[Any], Any] = _with(os.statvfs)
    for name in _ONLY_LINUX + _ONLY_POSIX:
        delattr(os, name)
    shutil.disk_usage = usage
    shutil._use_fd_functions = False  # type: ignore[attr-defined]
    locked: list[str] = []
    assert subprocess, "it asks for msvcrt to know where it is, so it has to be loaded already"
    sys.modules["msvcrt"] = _msvcrt(locked)
    for module in ("fcntl", "resource"):
        sys.modules[module] = None  # type: ignore[assignment]
    os.O_BINARY = _O_BINARY  # type: ignore[attr-defined]
    opened, rename, replace, unlink = os.open, os.rename, os.replace, os.unlink

    def open_bytes(path: Any, flags: int, mode: int = 0o777, **options: Any) -> int:
        assert path == os.devnull or flags & (_O_BINARY | os.O_TMPFILE), f"{path}: opened as text"
        return opened(path, flags & ~_O_BINARY, mode, **options)

    def rename_closed(old: Any, new: Any) -> None:
        _refuse_open(old)
        if Path(new).exists():
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(new))
        rename(old, new)

    def replace_closed(old: Any, new: Any) -> None:
        _refuse_open(old)
        _refuse_open(new)
        replace(old, new)

    def unlink_closed(path: Any, **options: Any) -> None:
        _refuse_open(path)
        unlink(path, **options)

    os.open, os.rename, os.replace, os.unlink = open_bytes, rename_closed, replace_closed, unlink_closed
    import gguf_tools.system.files as files

    files.IS_HELD_OPEN = True
    return locked


def _with(statvfs: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def usage(path: Any) -> Any:
        status = statvfs(path)
        return type("Usage", (), {"free": status.f_bavail * status.f_frsize})

    return usage


def _msvcrt(locked: list[str]) -> ModuleType:
    """Return a module that locks as msvcrt does: bytes from the position on, for one descriptor."""
    module: Any = ModuleType("msvcrt")

    def locking(fd: int, mode: int, n_bytes: int) -> None:
        start = os.lseek(fd, 0, os.SEEK_CUR)
        assert start >= 1 << 43, "a locked byte can't be read"
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _LOCK.pack(mode, os.SEEK_SET, start, n_bytes, 0))
        locked.append(os.readlink(f"/proc/self/fd/{fd}"))

    module.LK_NBLCK, module.locking = fcntl.F_WRLCK, locking
    return module


def _refuse_open(path: Any) -> None:
    """Raise PermissionError if this process has a file open."""
    name = os.path.realpath(path)
    for fd in os.listdir("/proc/self/fd"):
        try:
            held = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            continue
        if held == name:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))


SYSTEMS: dict[str, Callable[[], list[str]]] = {"macos": become_macos, "windows": become_windows}
