"""Calling the tokenizers library with a stranger's files: whatever it raises becomes BadTokenizer.

It raises bare Exceptions for what it refuses, and where its Rust code gives up a PanicException, which is no
Exception and has printed lines of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gguf_tools.errors import BadTokenizer, ToolkitError
from gguf_tools.text import shown


@contextmanager
def library_errors(path: Path, what: str) -> Iterator[None]:
    """Raise BadTokenizer in place of what the library raises.

    path  the file that it was given, for the message
    what  what it could not do with it
    """
    try:
        yield
    except (ToolkitError, MemoryError):
        raise
    except BaseException as cause:
        if isinstance(cause, Exception) or type(cause).__name__ == "PanicException":
            raise BadTokenizer(f"{path}: {what}: {shown(str(cause))}") from cause
        raise
