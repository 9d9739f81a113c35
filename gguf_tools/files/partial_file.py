"""Writing a GGUF file so that it is either complete or missing.

The file grows as PATH.partial beside PATH and takes PATH's name only when `publish` is called. Until
then the old file at PATH stays as it was; leaving the `with` block unpublished removes the partial.

Where the header will be, a partial begins with a mark, so that no program mistakes it for a GGUF file, and
nobody else's file under its name is mistaken for a partial: such a file, and a link, is refused. A run that
can be resumed keeps the partial, and puts its name into the mark. The first bytes of the header replace the
mark when all other bytes have been written.
"""

from __future__ import annotations

import ctypes
import errno
import os
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from gguf_tools.errors import OutputError
from gguf_tools.files.named_files import output_path
from gguf_tools.format.shards import FileLayout
from gguf_tools.system import files
from gguf_tools.system.files import Closing, is_at, open_own
from gguf_tools.system.locks import Lock, Taken, open_held

if TYPE_CHECKING:
    import numpy.typing as npt

PARTIAL_SUFFIX = ".partial"

_MARK = b"gguf-tools PART\n"
"""How a partial begins; with the name of its run it takes as many bytes as the shortest header."""

NO_RUN = bytes(8)
"""Stand-in for the name of a run, in the mark of a partial that belongs to none yet."""


class GGUFWriter:
    """The output of one FileLayout, filled in any order.

    path      where to write the file
    layout    what to write; its header is written by `publish`
    inputs    files being read; an output that is one of them is refused
    run       8 bytes that name a run which can be resumed: an unpublished partial stays, and one with the
              mark of this run is resumed. `mark` gives a new partial its mark
    whole     inode of this run's partial if all its data have been written, and perhaps its header
    found     whether a journal says that an interrupted run has left a partial here, or may have
    sealed    inodes of files that by this journal got their headers
    resumed   whether there was a partial of this run; what was written to it is still there

    Raises OutputError, naming the file, if the folder can't be written, if there is too little space, if
    another process is writing the same output, or if somebody else's file has the partial's name. Data that
    are not written are zeros.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        layout: FileLayout,
        inputs: Iterable[str | os.PathLike[str]] = (),
        *,
        run: bytes | None = None,
        whole: int | None = None,
        found: bool = False,
        sealed: frozenset[int] = frozenset(),
    ) -> None:
        self.path = Path(path)
        self.partial = self.path.with_name(self.path.name + PARTIAL_SUFFIX)
        self.layout = layout
        self.resumed = False
        self._run = run
        self._fd = -1
        self._lock = Lock()
        for written in (self.path, self.partial):
            refuse_inputs(written, inputs)
        output_path(self.path)
        self._open(os.O_CREAT)
        try:
            self.resumed = run is not None and self._is_of_run(run, whole)
            is_ours = self.resumed or self._is_ours(found, sealed)
        except BaseException:
            self.close()
            raise
        if not is_ours:
            self.close()
            raise OutputError.in_the_way(self.partial, "was not made by this program")
        try:
            if not self.resumed:
                self._leave_old_file()
                write_whole_at(self._fd, memoryview(_MARK + NO_RUN), 0, self.partial)
                self._reserve()
        except BaseException:
            self.discard()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
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
        write_whole_at(self._fd, left, offset, self.partial)

    def begin_writeback(self, offset: int, n_bytes: int) -> None:
        """Start writing finished bytes to the disk while the run continues, so that syncing is short.

        On Linux, POSIX_FADV_DONTNEED starts to write them, and drops from memory what is on the disk.
        """
        if hasattr(os, "posix_fadvise"):
            with files.moving(), suppress(OSError):  # some file systems refuse it, and it is advice
                os.posix_fadvise(self._fd, offset, n_bytes, os.POSIX_FADV_DONTNEED)

    def mark(self) -> None:
        """Mark the partial so that its run can resume it; raises OutputError."""
        assert self._run is not None, "no run to belong to"
        self.write(0, _MARK + self._run)

    def seal(self) -> int:
        """Complete the file and make it durable, still under its partial's name; returns its inode.

        raises  OutputError if the write fails
        """
        n_marked = len(_MARK) + len(NO_RUN)
        self.write(n_marked, self.layout.header[n_marked:])
        self.write(0, self.layout.header[:n_marked])
        with OutputError.from_os(f"{self.partial}: can't be written:"):
            files.sync(self._fd)
        return files.file_number(os.fstat(self._fd))

    def publish(self) -> None:
        """Seal the file and give it its name; raises OutputError."""
        self.seal()
        if not is_at(self._fd, self.partial):
            raise OutputError(f"{self.partial}: was removed or replaced while it was being written")
        with OutputError.from_os(f"{self.path}: can't be published:"):
            if files.IS_HELD_OPEN:
                self.close()
            files.rename(self.partial, self.path)
            self.close()
            files.sync_folder(self.path.parent)

    def _open(self, how: int) -> None:
        """Open the partial, and become its only writer.

        how     O_CREAT or O_EXCL, as in os.open
        raises  OutputError if it can't be opened, is a link, or if another process is writing it
        """
        try:
            self._fd, self._lock = open_held(self.partial, os.O_RDWR | os.O_CREAT | how)
        except Taken as error:
            what = "another process is writing it"
            raise OutputError("; ".join(filter(None, (f"{self.partial}: {what}", error.strerror)))) from error
        except OSError as error:
            raise OutputError(f"{self.partial}: can't be created: {error.strerror}") from error

    def _is_of_run(self, run: bytes, whole: int | None) -> bool:
        """Whether the partial was started by `run`."""
        status = os.fstat(self._fd)
        if status.st_size != self.layout.total_bytes:
            return False
        start = files.read_at(self._fd, len(_MARK) + len(run), 0)
        return start == _MARK + run or (
            files.file_number(status) == whole and self.layout.header.startswith(start)
        )

    def _is_ours(self, found: bool, sealed: frozenset[int]) -> bool:
        """Whether the partial is what a run of this program has left, or has nothing in it.

        A crash of the machine may cost the mark, and a kill may come between the header and the name.
        """
        status = os.fstat(self._fd)
        start = files.read_at(self._fd, len(_MARK), 0)  # all there is, where a kill has cut the mark
        if files.file_number(status) in sealed or start == _MARK[: status.st_size]:
            return True
        if status.st_size != self.layout.total_bytes:
            return False
        start = files.read_at(self._fd, len(self.layout.header), 0)
        return found or self._is_header(start) or not any(start[: len(_MARK + NO_RUN)])

    def _is_header(self, start: bytes) -> bool:
        """Whether a partial begins with its header, or with as much of it as a kill let replace the mark."""
        header, n_named = self.layout.header, len(_MARK + NO_RUN)
        n_same = next((n for n in range(len(header)) if start[n : n + 1] != header[n : n + 1]), len(header))
        return start[n_same : len(_MARK)] == _MARK[n_same:] and start[n_named:] == header[n_named:]

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
            with OutputError.from_os(f"{self.partial}: can't be created anew:"):
                self.partial.unlink()
                self._lock.release()
                self._open(os.O_EXCL)
        finally:
            if not files.IS_HELD_OPEN:
                os.close(old)

    def _reserve(self) -> None:
        """Reserve the space now, so that a full disk is noticed before hours of work."""
        total = self.layout.total_bytes
        with OutputError.from_os(f"{self.partial}: can't take {total:,} bytes:"):
            free = files.free_bytes(self.partial.parent)
            if free < total:
                raise OutputError(f"{self.path}: needs {total:,} bytes, {free:,} are free")
            if not _fallocate(self._fd, total):
                os.ftruncate(self._fd, total)

    def close(self) -> None:
        """Close the partial and leave it where it is."""
        fd, self._fd = self._fd, -1  # an interruption must not have it closed twice
        if fd >= 0:
            os.close(fd)
            self._lock.release()

    def discard(self) -> None:
        """Remove the partial, if it is open and still has its name, and close it."""
        if self._fd >= 0:
            files.remove_held(self._fd, self.partial, self.close)


class PartialFile(Closing):
    """The partial of a GGUFWriter, which may be in another process, open for filling.

    run     the run that it must belong to; None: any. A worker that outlives its run, and finds that another
            one has begun there, writes nothing; one that has the file open writes to a file without a name
    raises  OutputError if it can't be opened, or belongs to another run
    """

    def __init__(self, path: Path, run: bytes | None = None) -> None:
        self.path = path
        with OutputError.from_os(f"{path}: can't be opened:"):
            self._fd = open_own(path, os.O_RDWR)
        if run is not None and files.read_at(self._fd, len(_MARK) + len(run), 0) != _MARK + run:
            os.close(self._fd)
            raise OutputError(f"{path}: belongs to another run")

    def close(self) -> None:
        os.close(self._fd)

    def write(self, offset: int, data: memoryview) -> None:
        """Write bytes at an absolute offset; any number of threads and processes may do so at once.

        raises  OutputError if the write fails
        """
        write_whole_at(self._fd, data, offset, self.path)

    def sync(self) -> None:
        """Bring what is written to the disk; raises OutputError."""
        with OutputError.from_os(f"{self.path}: can't be synced:"):
            files.sync_data(self._fd)


def run_of_partial(start: bytes) -> bytes | None:
    """Return the name of the run, perhaps NO_RUN, whose partial begins like this; None: it is nobody's."""
    if not start.startswith(_MARK) or len(start) < len(_MARK + NO_RUN):
        return None
    return start[len(_MARK) : len(_MARK + NO_RUN)]


def write_whole_at(fd: int, data: memoryview, offset: int, name: Path | str) -> None:
    """Write bytes at an absolute offset; OutputError, which begins with `name`, if that fails."""
    with OutputError.from_os(f"{name}: can't be written:"):
        files.write_all(fd, data, offset)


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
