"""The standard streams of a command: one that is closed, full or no longer read stops no work.

What can't be written goes nowhere, and `LastingStream.error` tells afterwards that something was lost.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO, TypeGuard

from gguf_tools.system.files import open_file


class LastingStream:
    """A stream that can be written to for as long as the work takes.

    error  the first one of writing, None: all was written
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.error: OSError | None = None

    def write(self, text: str) -> int:
        if self.error is None:
            with self._noting():
                self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        if self.error is None:
            with self._noting():
                self._stream.flush()

    @contextmanager
    def _noting(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.error = error
            # Python writes what it still holds when it ends; that goes nowhere, too.
            with suppress(OSError), open(os.devnull, "w") as nowhere:
                os.dup2(nowhere.fileno(), self._stream.fileno())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def lasting_streams() -> Iterator[LastingStream]:
    """Let standard output and error last for a command; give the output."""
    _fill_gaps()
    before = sys.stdout, sys.stderr
    nowhere = _nowhere()
    out, err = (LastingStream(stream if _is_open(stream) else nowhere) for stream in before)
    sys.stdout, sys.stderr = out, err
    if _is_open(before[0]) and hasattr(before[0], "reconfigure"):
        before[0].reconfigure(errors="backslashreplace")  # instead of an error in the middle
    try:
        yield out
    finally:
        out.flush()
        err.flush()
        sys.stdout, sys.stderr = before
        nowhere.close()


def _nowhere() -> TextIO:
    """Return a stream for what has no reader."""
    try:
        return open(os.devnull, "w")
    except OSError:  # no more files may be open
        return io.StringIO()


def _is_open(stream: TextIO | None) -> TypeGuard[TextIO]:
    return stream is not None and not getattr(stream, "closed", False)


def _fill_gaps() -> None:
    """Open what is closed of the three standard files, so that no file of ours gets its number.

    What other libraries and processes write to standard output or error would go into it. Where no file can
    be opened at all, the command says so itself.
    """
    with suppress(OSError):
        while (number := open_file(os.devnull, os.O_RDWR)) <= 2:
            os.set_inheritable(number, True)
        os.close(number)
