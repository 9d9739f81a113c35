"""Changing the header of a file in place, so that a crash can be undone.

    1. NAME.undo, with the old header and the new one, is written and made durable
    2. the new header is written over the old one, and made durable
    3. NAME.undo is removed

NAME.undo gets its name once it is complete, so while it is missing the file is untouched or done. After a
crash in 2 or 3 the file's header is old here and new there, and `restore` writes the old one back.

    NAME.undo   the old header, the new header, then 56 bytes: the letters GGUFUNDO, the size of one
                header and the size of the file (uint64, little endian), SHA-256 of everything before

The old header comes first, so that it can be restored by hand:

    dd if=NAME.undo of=NAME bs=SIZE count=1 conv=notrunc
"""

from __future__ import annotations

import hashlib
import os
import stat
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from gguf_tools.errors import OutputError
from gguf_tools.files.named_files import remove_leftovers, whole_file
from gguf_tools.system import files
from gguf_tools.system.files import read_own
from gguf_tools.system.locks import Lock, Taken, hold

UNDO_SUFFIX = ".undo"

_MAGIC = b"GGUFUNDO"
_SIZES = struct.Struct("<8sQQ")
_HASH_BYTES = hashlib.sha256().digest_size


def undo_path(path: Path) -> Path:
    """Return the path of the undo file of `path`."""
    return path.with_name(path.name + UNDO_SUFFIX)


@contextmanager
def locked(path: Path) -> Iterator[int]:
    """Open and lock a file to change it; yields its descriptor.

    raises  OutputError if it can't be written, or if another process is changing it
    """
    with OutputError.from_os(f"{path}: can't be changed:"):
        fd = files.open_file(path, os.O_RDWR)
    lock = Lock()
    try:
        lock = _claim(fd, path)
        yield fd
    finally:
        os.close(fd)
        lock.release()


def _claim(fd: int, path: Path) -> Lock:
    try:
        return hold(fd, path)
    except OSError as error:
        what = "another process is changing it" if isinstance(error, Taken) else "can't be locked"
        raise OutputError("; ".join(filter(None, (f"{path}: {what}", error.strerror)))) from error


def replace_header(fd: int, path: Path, header: bytes) -> None:
    """Overwrite the header of a file with one of the same length.

    fd      descriptor from `locked`
    raises  OutputError if something can't be written; the old header is then restored, or still in NAME.undo
    """
    status = os.fstat(fd)
    old = files.read_at(fd, len(header), 0)
    content = old + header + _SIZES.pack(_MAGIC, len(header), status.st_size)
    undo = undo_path(path)
    if undo.is_symlink():
        raise OutputError(f"{undo}: is in the way, and was not left by an interrupted edit; move it away")
    if undo.exists():
        _read(undo)  # raises for somebody else's
    try:
        with whole_file(undo, stat.S_IMODE(status.st_mode)) as file:
            file.write(content + hashlib.sha256(content).digest())
        _write(fd, header)
        _remove(undo)
    except BaseException as error:
        with suppress(OSError):
            _write(fd, old)
            _remove(undo)
        if isinstance(error, OSError):
            raise OutputError(f"{path}: can't be written: {error.strerror}") from error
        raise


def restore(path: Path) -> bool:
    """Undo an interrupted `replace_header`; returns whether there was one.

    raises  OutputError if NAME.undo isn't of this file, or if another process is changing the file
    """
    undo = undo_path(path)
    remove_leftovers(undo)
    if not undo.exists():
        return False
    with locked(path) as fd:
        if not undo.exists():  # who held the lock has finished meanwhile
            return False
        old, new, file_bytes = _read(undo)
        if os.fstat(fd).st_size != file_bytes or not _is_mixture(files.read_at(fd, len(old), 0), old, new):
            raise OutputError(
                f"{undo}: was kept for another state of {path.name}; if that file is as it should be, "
                f"remove {undo.name}"
            )
        with OutputError.from_os(f"{path}: can't be restored from {undo.name}:"):
            _write(fd, old)
            _remove(undo)
    return True


def _read(undo: Path) -> tuple[bytes, bytes, int]:
    """Return the old header, the new one, and the size of the file."""
    with OutputError.from_os(f"{undo}: isn't what an interrupted edit leaves"):
        content = read_own(undo)
    body, digest = content[:-_HASH_BYTES], content[-_HASH_BYTES:]
    if len(body) >= _SIZES.size and hashlib.sha256(body).digest() == digest:
        magic, n_bytes, file_bytes = _SIZES.unpack(body[-_SIZES.size :])
        if magic == _MAGIC and len(body) == 2 * n_bytes + _SIZES.size:
            return body[:n_bytes], body[n_bytes : 2 * n_bytes], file_bytes
    raise OutputError(f"{undo}: isn't what an interrupted edit leaves; move it away")


def _is_mixture(mixed: bytes, old: bytes, new: bytes) -> bool:
    """Whether every byte comes from the old header or the new one: a crash can leave any such mixture."""
    import numpy as np

    if len(mixed) != len(old):
        return False
    bytes_found, bytes_old, bytes_new = (np.frombuffer(header, np.uint8) for header in (mixed, old, new))
    return bool(((bytes_found == bytes_old) | (bytes_found == bytes_new)).all())


def _write(fd: int, content: bytes) -> None:
    files.write_all(fd, content, 0)
    files.sync(fd)


def _remove(undo: Path) -> None:
    undo.unlink()
    files.sync_folder(undo.parent)
