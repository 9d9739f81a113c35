"""Copying a range of bytes from one file to another, in the kernel where possible.

`copy_file_range` keeps the bytes out of this process, and lets a file system share blocks instead of
copying them. Where it is missing or refuses (file systems of two kinds, old kernels, containers), the
same range goes through a small buffer. Both take explicit offsets and leave file positions alone, so
any number of threads may copy between the same two files.
"""

from __future__ import annotations

import os

from gguf_tools.errors import OutputError, TruncatedError
from gguf_tools.progress import Progress
from gguf_tools.system import files

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
    progress: Progress | None = None,
) -> None:
    """Copy `n_bytes` bytes; the two ranges must not overlap if the files are the same.

    source_name  for messages: the file and the part of it, "model.gguf: tensor 'output.weight'"
    target_name  for messages: the file
    progress     called with the number of bytes after each piece
    raises       TruncatedError if the source ends early, OutputError if the target can't be written,
                 OSError with `source_name` as its file if the source can't be read
    """
    end = source_offset + n_bytes
    shift = target_offset - source_offset
    position = source_offset
    while position < end:
        # Why it refuses differs from kernel to kernel, and it doesn't say which of the two files is
        # at fault; reading and writing does. Nor is 0 to be trusted: some file systems return it
        # where there are bytes to read.
        try:
            count = min(end - position, _CALL_BYTES)
            n_copied = os.copy_file_range(source_fd, target_fd, count, position, position + shift)
        except (OSError, AttributeError):  # Linux alone has it
            n_copied = 0
        if not n_copied:
            _copy_through_buffer(
                source_fd, position, target_fd, position + shift, end - position, source_name, target_name,
                progress,
            )
            return
        position += n_copied
        if progress is not None:
            progress(n_copied)


def _copy_through_buffer(
    source_fd: int, source_offset: int, target_fd: int, target_offset: int, n_bytes: int, source_name: str,
    target_name: str, progress: Progress | None,
) -> None:
    buffer = memoryview(bytearray(min(n_bytes, _BUFFER_BYTES)))
    n_left = n_bytes
    while n_left:
        try:
            n_read = files.read_into(source_fd, buffer[:n_left], source_offset)
        except OSError as error:
            raise OSError(error.errno, error.strerror, source_name) from error
        if not n_read:
            raise TruncatedError(
                f"{source_name} ends at byte {source_offset}, {n_left} bytes early; "
                "the file has become shorter since it was opened"
            )
        _write(target_fd, target_offset, buffer[:n_read], target_name)
        source_offset += n_read
        target_offset += n_read
        n_left -= n_read
        if progress is not None:
            progress(n_read)


def _write(fd: int, offset: int, data: memoryview, name: str) -> None:
    try:
        while data:
            n_written = files.write_at(fd, data, offset)
            data = data[n_written:]
            offset += n_written
    except OSError as error:
        raise OutputError(f"{name}: can't be written: {error.strerror}") from error
