"""New files made of the tensors of other files: data are copied, never decoded, in the kernel where possible.

`copy_file_range` keeps the bytes out of this process, and lets a file system share blocks instead of
copying them. Where it is missing or refuses (file systems of two kinds, old kernels, containers), the
same range goes through a small buffer. Both take explicit offsets and leave file positions alone, so
any number of threads may copy between the same two files.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from gguf_tools.errors import OutputError, TruncatedError
from gguf_tools.files.inputs import InputWatch, gguf_input
from gguf_tools.files.journal import journal_path
from gguf_tools.files.partial_file import PARTIAL_SUFFIX, GGUFWriter, write_whole_at
from gguf_tools.format.reader import GGUFFile
from gguf_tools.format.shards import FileLayout
from gguf_tools.progress import NO_REPORT, Advance, Reporter
from gguf_tools.system import files


@dataclass(frozen=True)
class Origin:
    """Where the data of a tensor come from: the file, and the tensor's name there."""

    file: GGUFFile
    name: str


@dataclass(frozen=True)
class NewFile:
    """A file to be written.

    path         where
    layout       what to write
    origins      where the data of each tensor of the layout come from, in order
    permissions  mode bits of the file; None for the default
    """

    path: Path
    layout: FileLayout
    origins: tuple[Origin, ...] = field(repr=False)
    permissions: int | None = None

    @property
    def data_bytes(self) -> int:
        """Bytes to copy."""
        return sum(info.n_bytes for info in self.layout.tensors)


def write_files(
    files: Sequence[NewFile], inputs: Iterable[str | os.PathLike[str]], progress: Reporter = NO_REPORT
) -> None:
    """Write all `files`; see `written`."""
    with written(files, inputs, progress):
        pass


@contextmanager
def written(
    files: Sequence[NewFile], inputs: Iterable[str | os.PathLike[str]], progress: Reporter = NO_REPORT
) -> Iterator[None]:
    """Write all `files`, run the `with` block, and then rename them into place, the first one last.

    A run that is interrupted, that runs out of space, or whose block fails changes nothing. One that is
    killed or fails while it renames leaves complete files: some old, some new, the first still old, and the
    partials of those that got no name, by which the next run knows that it goes on.

    inputs  files that must not be overwritten
    raises  OutputError, TruncatedError, OSError; see GGUFWriter and copy_range. ChangedInput for a file
            that data come from, and that has changed meanwhile
    """
    for file in files:
        _refuse_unfinished(file.path)
    origins = {origin.file.path: origin.file for file in files for origin in file.origins}
    watch = InputWatch(map(gguf_input, origins.values()))
    with ExitStack() as opened:
        writers = [opened.enter_context(GGUFWriter(file.path, file.layout, inputs)) for file in files]
        progress.start(sum(file.data_bytes for file in files), 0)
        for file, writer in zip(files, writers, strict=True):
            _copy_data(file, writer, progress.advance)
        for file, writer in zip(files, writers, strict=True):
            _finish(file, writer)
        watch.refuse_changed()
        yield
        for number, writer in enumerate(reversed(writers)):
            try:
                writer.publish()
            except BaseException:
                for each in writers if number or not writer.is_open else ():  # some have their names
                    each.close()
                raise


def _refuse_unfinished(path: Path) -> None:
    """Raise OutputError where an interrupted run has left its work in the partial that would be written."""
    journal = journal_path(path)
    if journal.exists():
        raise OutputError(
            f"{path}: an interrupted run keeps its work in {path.name}{PARTIAL_SUFFIX}; let it end first, or"
            f" remove {journal.name}"
        )


def _copy_data(file: NewFile, writer: GGUFWriter, advance: Advance) -> None:
    layout = file.layout
    for info, offset, origin in zip(layout.tensors, layout.offsets, file.origins, strict=True):
        copy_range(
            origin.file.fileno(),
            origin.file.data_offset(origin.name),
            writer.fileno(),
            offset,
            info.n_bytes,
            f"{origin.file.path}: tensor {origin.name!r}",
            str(writer.partial),
            advance=advance,
        )


def _finish(file: NewFile, writer: GGUFWriter) -> None:
    """Make a file durable under the name of its partial, so that publishing takes no time."""
    if file.permissions is not None:
        with OutputError.from_os(f"{writer.partial}: can't get its permissions:"):
            os.chmod(writer.partial, file.permissions)
    writer.seal()


# Of one call: large enough to cost nothing, small enough to be interrupted and to move a progress bar.
_CALL_BYTES = 64 << 20
_BUFFER_BYTES = 1 << 20


def copy_range(
    source_fd: int,
    source_offset: int,
    target_fd: int,
    target_offset: int,
    n_bytes: int,
    source_name: str,
    target_name: str,
    *,
    advance: Advance = NO_REPORT.advance,
) -> None:
    """Copy `n_bytes` bytes; the two ranges must not overlap if the files are the same.

    source_name  for messages: the file and the part of it, "model.gguf: tensor 'output.weight'"
    target_name  for messages: the file
    advance      called with the number of bytes after each piece
    raises       TruncatedError if the source ends early, OutputError if the target can't be written,
                 OSError with `source_name` as its file if the source can't be read
    """
    end = source_offset + n_bytes
    shift = target_offset - source_offset
    position = source_offset
    buffer: memoryview | None = None
    while position < end:
        # Why it refuses differs from kernel to kernel, and it doesn't say which of the two files is
        # at fault; reading and writing does. Nor is 0 to be trusted: some file systems return it
        # where there are bytes to read.
        n_copied = 0
        if buffer is None:
            count = min(end - position, _CALL_BYTES)
            with suppress(OSError, AttributeError):  # Linux alone has it
                n_copied = os.copy_file_range(source_fd, target_fd, count, position, position + shift)
        if not n_copied:
            buffer = buffer or memoryview(bytearray(min(end - position, _BUFFER_BYTES)))
            try:
                n_copied = files.read_into(source_fd, buffer[: end - position], position)
            except OSError as error:
                raise OSError(error.errno, error.strerror, source_name) from error
            if not n_copied:
                raise TruncatedError(
                    f"{source_name} ends at byte {position}, {end - position} bytes early; "
                    "the file has become shorter since it was opened"
                )
            write_whole_at(target_fd, buffer[:n_copied], position + shift, target_name)
        position += n_copied
        advance(n_copied)
