"""Writing a GGUF file so that it is either complete or missing.

The file grows as PATH.partial beside PATH and takes PATH's name only when `publish` is called. Until
then the old file at PATH stays as it was; leaving the `with` block unpublished removes the partial.

A run that can be resumed keeps the partial. Where the header will be, it begins with a mark of the run, so
that no program mistakes it for a GGUF file, and no other run for its own. The first bytes of the header
replace the mark when all other bytes have been written.
"""

from __future__ import annotations

import ctypes
import errno
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from gguf_tools.errors import OutputError
from gguf_tools.layout import FileLayout
from gguf_tools.system import files
from gguf_tools.system.locks import try_lock

if TYPE_CHECKING:
    import numpy.typing as npt

PARTIAL_SUFFIX = ".partial"

_MARK = b"PART"


class GGUFWriter:
    """The output of one FileLayout, filled in any order.

    path      where to write the file
    layout    what to write; its header is written at once, or by `publish` if there is a `run`
    inputs    files being read; an output that is one of them is refused
    run       8 bytes that name a run which can be resumed: an unpublished partial stays, and one with the
              mark of this run is resumed. `mark` gives a new partial its mark
    whole     inode of this run's partial if all its data have been written, and perhaps its header
    resumed   whether there was a partial of this run; what was written to it is still there

    Raises OutputError, naming the file, if the folder can't be written, if there is too little space,
    or if another process is writing the same output. Data that are not written are zeros.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        layout: FileLayout,
        inputs: Iterable[str | os.PathLike[str]] = (),
        *,
        run: bytes | None = None,
        whole: int | None = None,
    ) -> None:
        self.path = Path(path)
        self.partial = self.path.with_name(self.path.name + PARTIAL_SUFFIX)
        self.layout = layout
        self.resumed = False
        self._run = run
        self._fd = -1
        for written in (self.path, self.partial):
            refuse_inputs(written, inputs)
        if self.path.is_dir():
            raise OutputError(f"{self.path}: is a directory, expected a file name")
        try:
            self._fd = files.open_file(self.partial, os.O_RDWR | os.O_CREAT)
        except OSError as error:
            raise OutputError(f"{self.partial}: can't be created: {error.strerror}") from error
        try:
            self._claim()
            self.resumed = run is not None and self._is_of_run(run, whole)
            if not self.resumed:
                self._leave_old_file()
                self._reserve()
            if run is None:
                self.write(0, layout.header)
        except BaseException:
            if self.resumed:
                self.close()
            self.discard()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._run is not None:
            self.close()
        self.discard()

    @property
    def is_open(self) -> bool:
        """Whether the partial is still being written."""
        return self._fd >= 0

    def fileno(self) -> int:
        """Return the partial's descriptor, for copies that the kernel makes."""
        return self._fd

    def write(self, offset: int, data: bytes | bytearray | memoryview | npt.NDArray[Any]) -> None:
        """Write `data` at an absolute offset; any number of threads may do so at once.

        data    bytes, or a C-contiguous array of plain numbers
        raises  OutputError if the write fails; ValueError if it would end outside the layout
        """
        buffer: Any = data  # Python 3.11 has no type for what memoryview takes
        left = memoryview(buffer).cast("B")
        if offset < 0 or offset + len(left) > self.layout.total_bytes:
            raise ValueError(
                f"{self.path}: bytes {offset} to {offset + len(left)} are outside "
                f"the {self.layout.total_bytes} bytes of the layout"
            )
        _write_at(self._fd, left, offset, self.partial)

    def begin_writeback(self, offset: int, n_bytes: int) -> None:
        """Start writing finished bytes to the disk while the run continues, so that syncing is short.

        On Linux, POSIX_FADV_DONTNEED starts to write them, and drops from memory what is on the disk.
        """
        if hasattr(os, "posix_fadvise"):
            with files.moving():
                os.posix_fadvise(self._fd, offset, n_bytes, os.POSIX_FADV_DONTNEED)

    def mark(self) -> None:
        """Mark the partial so that its run can resume it; raises OutputError."""
        assert self._run is not None, "no run to belong to"
        self.write(0, _MARK + self._run)

    def seal(self) -> int:
        """Complete the file and make it durable, still under its partial's name; returns its inode.

        raises  OutputError if the write fails
        """
        if self._run is not None:
            n_marked = len(_MARK) + len(self._run)
            self.write(n_marked, self.layout.header[n_marked:])
            self.write(0, self.layout.header[:n_marked])
        try:
            files.sync(self._fd)
        except OSError as error:
            raise OutputError(f"{self.partial}: can't be written: {error.strerror}") from error
        return os.fstat(self._fd).st_ino

    def publish(self) -> None:
        """Seal the file and give it its name; raises OutputError."""
        self.seal()
        try:
            if files.IS_HELD_OPEN:
                self.close()
            files.rename(self.partial, self.path)
            self.close()
            files.sync_folder(self.path.parent)
        except OSError as error:
            raise OutputError(f"{self.path}: can't be published: {error.strerror}") from error

    def _claim(self) -> None:
        """Become the only writer of the partial, or raise."""
        try:
            try_lock(self._fd)
            # Between our open and our lock its owner may have published or removed it. Then this is
            # the finished file, or nobody's.
            owned = os.path.samestat(os.fstat(self._fd), os.stat(self.partial))
        except OSError:
            owned = False
        if not owned:
            self.close()
            raise OutputError(f"{self.partial}: another process is writing it")

    def _is_of_run(self, run: bytes, whole: int | None) -> bool:
        """Whether the partial was started by `run`."""
        status = os.fstat(self._fd)
        if status.st_size != self.layout.total_bytes:
            return False
        start = files.read_at(self._fd, len(_MARK) + len(run), 0)
        return start == _MARK + run or (status.st_ino == whole and self.layout.header.startswith(start))

    def _leave_old_file(self) -> None:
        """Begin a new file in place of one that a worker may still write to that outlived another run.

        raises  OutputError if it can't be created, or if another process is faster
        """
        if not os.fstat(self._fd).st_size:
            return
        old, self._fd = self._fd, -1
        if files.IS_HELD_OPEN:
            os.close(old)
        try:
            self.partial.unlink()
            self._fd = files.open_file(self.partial, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        except OSError as error:
            raise OutputError(f"{self.partial}: can't be created anew: {error.strerror}") from error
        finally:
            if not files.IS_HELD_OPEN:
                os.close(old)
        self._claim()

    def _reserve(self) -> None:
        """Reserve the space now, so that a full disk is noticed before hours of work."""
        total = self.layout.total_bytes
        try:
            os.ftruncate(self._fd, 0)
            free = files.free_bytes(self.partial.parent)
            if free < total:
                raise OutputError(f"{self.path}: needs {total:,} bytes, {free:,} are free")
            if not _fallocate(self._fd, total):
                os.ftruncate(self._fd, total)
        except OSError as error:
            raise OutputError(f"{self.partial}: can't take {total:,} bytes: {error.strerror}") from error

    def close(self) -> None:
        """Close the partial and leave it where it is."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def discard(self) -> None:
        """Remove the partial, if it is open, and close it."""
        if self._fd >= 0:
            if files.IS_HELD_OPEN:
                self.close()
            self.partial.unlink(missing_ok=True)
            self.close()


class PartialFile:
    """The partial of a GGUFWriter, which may be in another process, open for filling.

    run     the run that it must belong to; None: any. A worker that outlives its run, and finds that another
            one has begun there, writes nothing; one that has the file open writes to a file without a name
    raises  OutputError if it can't be opened, or belongs to another run
    """

    def __init__(self, path: Path, run: bytes | None = None) -> None:
        self.path = path
        try:
            self._fd = files.open_file(path, os.O_RDWR)
        except OSError as error:
            raise OutputError(f"{path}: can't be opened: {error.strerror}") from error
        if run is not None and files.read_at(self._fd, len(_MARK) + len(run), 0) != _MARK + run:
            os.close(self._fd)
            raise OutputError(f"{path}: belongs to another run")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._fd)

    def write(self, offset: int, data: memoryview) -> None:
        """Write bytes at an absolute offset; any number of threads and processes may do so at once.

        raises  OutputError if the write fails
        """
        _write_at(self._fd, data, offset, self.path)

    def sync(self) -> None:
        """Bring what is written to the disk; raises OutputError."""
        try:
            files.sync_data(self._fd)
        except OSError as error:
            raise OutputError(f"{self.path}: can't be synced: {error.strerror}") from error


def _write_at(fd: int, data: memoryview, offset: int, path: Path) -> None:
    try:
        while data:
            n_written = files.write_at(fd, data, offset)
            data = data[n_written:]
            offset += n_written
    except OSError as error:
        raise OutputError(f"{path}: can't be written: {error.strerror}") from error


def refuse_inputs(written: Path, inputs: Iterable[str | os.PathLike[str]]) -> None:
    """Raise OutputError if `written`, a file that is about to be written, is one of `inputs`."""
    for given in inputs:
        if written.exists() and os.path.exists(given) and os.path.samefile(written, given):
            raise OutputError(f"{written}: is an input of this run; write somewhere else")


def _fallocate(fd: int, n_bytes: int) -> bool:
    """Reserve the space of a whole file; False where the file system can't.

    The C library's posix_fallocate (and Python's) would then write into every block, so the system call is
    made directly.
    """
    if not sys.platform.startswith("linux") or not n_bytes:
        return False
    fallocate = ctypes.CDLL(None, use_errno=True).fallocate
    fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    if fallocate(fd, 0, 0, n_bytes) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINTR):
        return False
    raise OSError(code, os.strerror(code))
