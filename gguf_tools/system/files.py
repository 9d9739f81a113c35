"""Files, as every system has them: bytes at an offset, what is sure to be on the disk, names, our own files.

Linux and macOS read and write at an offset without moving the position of a descriptor, so threads share
one. Windows has only the position, which threads would move under each other: there one thread at a time
seeks and reads or writes. macOS lacks `fdatasync`, and its `fsync` leaves data in the drive's own memory;
there a call of `fcntl` does not, and a call that moves 2 GiB or more is refused. Windows neither renames nor
removes a file that is open, can't sync a folder, and does not say when a file got another name.

Files that a run keeps beside its outputs are opened as our own, never through a link: a symbolic or hard
link under the name of a journal or a partial leads to a file that somebody still needs. So such a file is
opened only if it is an ordinary file with one name.

In open folders, names stand for what is there and never for what a link leads to. A path may lead elsewhere
at any time: somebody replaces a folder of it by a link. A folder that is open stays the same one. So what
is removed is opened step by step from a folder that the user named, and by names in it. Windows has no such
calls; there paths are looked at first.
"""

from __future__ import annotations

import errno
import os
import stat
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from gguf_tools.errors import MissingFile


class Closing(ABC):
    """Something that a with-block closes at its end."""

    @abstractmethod
    def close(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


NO_WAIT = getattr(os, "O_NONBLOCK", 0)
"""The flag to open a file that may be a pipe, without waiting for its writer; Windows has no such files."""

BINARY = getattr(os, "O_BINARY", 0)
"""The flag with which Windows leaves the ends of lines alone; elsewhere nothing else is known."""

IS_WINDOWS = os.name == "nt"

IS_HELD_OPEN = IS_WINDOWS
"""Whether a file that is open keeps its name: it can be neither renamed nor removed."""

SLASHES = tuple(filter(None, (os.sep, os.altsep)))
"""Characters of which one may end the name of a folder."""

_HAS_ONE_CASE = IS_WINDOWS or sys.platform == "darwin"
"""Whether upper and lower case are the same in names; on a Mac, disks for which they are not are rare."""

_position = threading.Lock()


@dataclass(frozen=True)
class Moved:
    """Time that threads have spent in calls that move many bytes from and to files.

    seconds      by the clock, summed over threads
    cpu_seconds  of a processor among them, which copies to and from the page cache; the rest is waiting
    """

    seconds: float = 0.0
    cpu_seconds: float = 0.0

    def since(self, earlier: Moved) -> Moved:
        return Moved(self.seconds - earlier.seconds, self.cpu_seconds - earlier.cpu_seconds)


class _Total:
    """The time of all such calls of this process so far."""

    def __init__(self) -> None:
        self.moved, self._lock = Moved(), threading.Lock()

    def add(self, seconds: float, cpu_seconds: float) -> None:
        with self._lock:
            self.moved = Moved(self.moved.seconds + seconds, self.moved.cpu_seconds + cpu_seconds)


_TOTAL = _Total()


def moved() -> Moved:
    """Return the time of all such calls of this process so far."""
    return _TOTAL.moved


@contextmanager
def moving() -> Iterator[None]:
    """Count the time of this block as such a call's."""
    began, cpu_began = time.monotonic(), time.thread_time()
    try:
        yield
    finally:
        _TOTAL.add(time.monotonic() - began, time.thread_time() - cpu_began)


def open_file(
    path: str | os.PathLike[str], flags: int, permissions: int = 0o666, dir_fd: int | None = None
) -> int:
    """Open a file of bytes, for this process only; returns a descriptor. Takes what os.open takes."""
    in_folder = {} if dir_fd is None else {"dir_fd": dir_fd}  # which Windows does not know
    return os.open(path, flags | BINARY, permissions, **in_folder)


def absolute(path: str | os.PathLike[str]) -> Path:
    """Return a path from the root, without . and .. in it, and with links as they are.

    raises  MissingFile for a relative path where the working directory is gone
    """
    try:
        return Path(os.path.abspath(path))
    except FileNotFoundError as error:
        raise MissingFile(f"{os.fspath(path) or '.'}: {WORKING_FOLDER_IS_GONE}") from error


WORKING_FOLDER_IS_GONE = "the working directory was removed; change to an existing one"


def name_key(path: str | os.PathLike[str]) -> str:
    """Return a text that two paths have in common if no system has two files under their names."""
    whole = os.path.abspath(path)
    return whole.casefold() if _HAS_ONE_CASE else whole


def file_number(status: os.stat_result) -> int:
    """Return the number of a file on its disk, which no other file there has, in 64 bits.

    Windows has disks (ReFS) with numbers of 128 bits, of which the upper half is that of the folder.
    """
    return status.st_ino & (1 << 64) - 1


def changed_ns(status: os.stat_result) -> int:
    """Return when a file was last changed, in nanoseconds: its content, and also its name or its place.

    Windows says when the content was changed, and when the file was made in its place.
    """
    return max(status.st_ctime_ns, status.st_mtime_ns) if IS_WINDOWS else status.st_ctime_ns


def read_at(fd: int, n_bytes: int, offset: int) -> bytes:
    """Return up to 1 GiB from an absolute offset, fewer bytes where the file ends; from any thread."""
    n_bytes = min(n_bytes, _CALL_BYTES)
    if hasattr(os, "pread"):
        return os.pread(fd, n_bytes, offset)
    with _position:
        os.lseek(fd, offset, os.SEEK_SET)
        return os.read(fd, n_bytes)


def read_into(fd: int, buffer: memoryview, offset: int) -> int:
    """Fill a buffer of bytes from an absolute offset, or some of it; returns how many, 0 at the end."""
    if hasattr(os, "preadv"):
        with moving():
            return os.preadv(fd, [buffer[:_CALL_BYTES]], offset)
    data = read_at(fd, len(buffer), offset)
    buffer[: len(data)] = data
    return len(data)


def fill(fd: int, buffer: memoryview, offset: int) -> int:
    """Fill a buffer of bytes from an absolute offset, in as many calls as it takes; returns how many came.

    Fewer come only where the file ends.
    """
    done = 0
    while done < len(buffer) and (n_read := read_into(fd, buffer[done:], offset + done)):
        done += n_read
    return done


def write_at(fd: int, data: bytes | memoryview, offset: int) -> int:
    """Write bytes at an absolute offset, or some of them; returns how many. From any thread."""
    data = memoryview(data)[:_CALL_BYTES]
    if hasattr(os, "pwrite"):
        with moving():
            return os.pwrite(fd, data, offset)
    with _position:
        os.lseek(fd, offset, os.SEEK_SET)
        return os.write(fd, data)


def write_all(fd: int, data: bytes | memoryview, offset: int) -> None:
    """Write bytes at an absolute offset, in as many calls as it takes. From any thread."""
    left = memoryview(data)
    while left:
        n_written = write_at(fd, left, offset)
        left, offset = left[n_written:], offset + n_written


def append_all(fd: int, data: bytes) -> None:
    """Write bytes where a descriptor stands; a disk that becomes full takes a part of them first."""
    left = memoryview(data)
    while left:
        left = left[os.write(fd, left) :]


_CALL_BYTES = 1 << 30
"""Most bytes of one call: macOS and Windows count them in 32 bits, and macOS refuses more."""


SYNC_SECONDS = 60.0
"""Most work, in seconds, that a crash of the machine may cost: a run's files are synced as often."""


def sync(fd: int) -> None:
    """Bring a file to the disk: its data, its size and its times; raises OSError."""
    with moving():
        if not _sync_drive(fd):
            os.fsync(fd)


def sync_data(fd: int) -> None:
    """Bring the data of a file to the disk, and what is needed to read them; raises OSError."""
    if hasattr(os, "fdatasync"):
        os.fdatasync(fd)
    else:
        sync(fd)


def _sync_drive(fd: int) -> bool:
    """Have macOS empty the drive's own memory too; False where that is not needed, or not possible."""
    try:
        import fcntl

        code: Any = fcntl.F_FULLFSYNC  # type: ignore[attr-defined]
        fcntl.fcntl(fd, code)
    except (ImportError, AttributeError, OSError):
        return False
    return True


def sync_folder(folder: Path) -> None:
    """Bring the names in a folder to the disk, where a system lets one; raises OSError."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def rename(old: Path, new: Path) -> None:
    """Give a file another name, in place of a file that may have it; raises OSError."""
    if IS_HELD_OPEN:
        os.replace(old, new)
    else:
        os.rename(old, new)


def free_bytes(folder: Path) -> int:
    """Return how much a user may still write into a folder; raises OSError."""
    import shutil

    return shutil.disk_usage(folder).free


def allocated_bytes(path: Path) -> int:
    """Return how much of the disk a file takes; its size, where a system does not say."""
    status = path.stat()
    return status.st_blocks * 512 if hasattr(status, "st_blocks") else status.st_size


_NO_FOLLOW = getattr(os, "O_NOFOLLOW", 0)
_IS_LINK = "it is a link to a file that would be overwritten; remove the link, or name another output"
_IS_SPECIAL = "it is no ordinary file; remove it, or name another output"


def open_own(
    path: str | os.PathLike[str], flags: int, permissions: int = 0o666, dir_fd: int | None = None
) -> int:
    """Open a file that only we write; returns a descriptor.

    flags   those of os.open, as are the others; with O_TRUNC it is emptied once it is known to be no link
    raises  OSError, also for a link, for a file with several names, and for a folder or device
    """
    try:
        if not _NO_FOLLOW and os.path.islink(path):
            raise OSError(errno.ELOOP, _IS_LINK, os.fspath(path))
        fd = open_file(path, (flags & ~os.O_TRUNC) | _NO_FOLLOW | NO_WAIT, permissions, dir_fd)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EMLINK):
            raise OSError(errno.ELOOP, _IS_LINK, os.fspath(path)) from error
        raise
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, _IS_SPECIAL, os.fspath(path))
        if status.st_nlink > 1:
            raise OSError(errno.ELOOP, _IS_LINK, os.fspath(path))
        if flags & os.O_TRUNC:
            os.ftruncate(fd, 0)
    except BaseException:
        os.close(fd)
        raise
    return fd


def is_at(fd: int, path: str | os.PathLike[str]) -> bool:
    """Whether an open file still has this name: it was neither removed, nor did another take its place.

    Where the system can't say (it has no memory left, for instance), it is assumed to: that is the rule.
    """
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path, follow_symlinks=False))
    except FileNotFoundError:
        return False
    except OSError:
        return True


def remove_held(fd: int, path: Path, close: Callable[[], object]) -> None:
    """Remove a file that is open and locked, if it still has this name, and close it; raises OSError."""
    is_there = is_at(fd, path)
    if IS_HELD_OPEN:
        close()
    if is_there:
        path.unlink(missing_ok=True)
    close()


def read_own(path: str | os.PathLike[str], most: int = 1 << 30) -> bytes:
    """Return the start of a file that only we write, up to `most` bytes; raises OSError as `open_own`."""
    fd = open_own(path, os.O_RDONLY)
    with os.fdopen(fd, "rb") as file:
        return file.read(most)


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
        with suppress(OSError):
            fd = self.open_own(name, os.O_RDONLY)
            try:
                return read_at(fd, n_bytes, 0)
            finally:
                os.close(fd)
        return b""

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
