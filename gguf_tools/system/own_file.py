"""Files that a run keeps for itself: never opened through a link, so nobody else's file is written.

A file in a work folder may have been put there by somebody else, as a symbolic or a hard link to a file
elsewhere. Writing to it would write there. So such a file is refused before its first byte is touched.
"""

from __future__ import annotations

import errno
import os
import stat

from gguf_tools.system.files import NO_WAIT, open_file

_NO_FOLLOW = getattr(os, "O_NOFOLLOW", 0)


def open_own(path: str | os.PathLike[str], flags: int, permissions: int = 0o644) -> int:
    """Open a file that has no other name; returns a descriptor. `flags` are those of os.open.

    raises  OSError, also for a link of either kind, a pipe or a device; what it names stays as it is
    """
    if not _NO_FOLLOW and os.path.islink(path):
        raise OSError(errno.ELOOP, "is a symbolic link")
    try:
        fd = open_file(path, (flags & ~os.O_TRUNC) | _NO_FOLLOW | NO_WAIT, permissions)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, "is a symbolic link") from error
        raise
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "is not a regular file")
        if status.st_nlink > 1:
            raise OSError(errno.EMLINK, "has another name, too: it is a hard link")
        if flags & os.O_TRUNC:
            os.ftruncate(fd, 0)
    except BaseException:
        os.close(fd)
        raise
    return fd
