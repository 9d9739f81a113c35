"""Turns whatever the tokenizers library raises for a file into BadTokenizer.

The library raises bare Exceptions for files that it refuses. Where its Rust code panics it raises
PanicException, which isn't derived from Exception, after printing lines of its own.
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

    path  the file that the library was given, for the message
    what  what went wrong, in words: "its tokens can't be added"
    """
    try:
        yield
    except (ToolkitError, MemoryError):
        raise
    except BaseException as cause:
        if isinstance(cause, Exception) or type(cause).__name__ == "PanicException":
            raise BadTokenizer(f"{path}: {what}: {shown(str(cause))}") from cause
        raise
