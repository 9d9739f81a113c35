"""Files that a run keeps beside its outputs: they are opened as our own, never through a link.

A symbolic or hard link under the name of a journal or a partial leads to a file that somebody still needs. So
such a file is opened only if it is an ordinary file with one name.
"""

from __future__ import annotations

import errno
import os
import stat

from gguf_tools.system.files import NO_WAIT, open_file

_NO_FOLLOW = getattr(os, "O_NOFOLLOW", 0)
_IS_LINK = "it is a link to a file that would be overwritten; remove the link, or name another output"
_IS_SPECIAL = "it is no ordinary file; remove it, or name another output"


def open_own(path: str | os.PathLike[str], flags: int, permissions: int = 0o666) -> int:
    """Open a file that only we write; returns a descriptor.

    flags   those of os.open; with O_TRUNC it is emptied once it is known to be no link
    raises  OSError, also for a link, for a file with several names, and for a folder or device
    """
    try:
        if not _NO_FOLLOW and os.path.islink(path):
            raise OSError(errno.ELOOP, _IS_LINK, os.fspath(path))
        fd = open_file(path, (flags & ~os.O_TRUNC) | _NO_FOLLOW | NO_WAIT, permissions)
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


def read_own(path: str | os.PathLike[str], most: int = 1 << 30) -> bytes:
    """Return the start of a file that only we write, up to `most` bytes; raises OSError as `open_own`."""
    fd = open_own(path, os.O_RDONLY)
    with os.fdopen(fd, "rb") as file:
        return file.read(most)
