"""Small files written whole: what has the name is complete, whatever interrupts the writing."""

from __future__ import annotations

from pathlib import Path

from gguf_tools.errors import OutputError
from gguf_tools.writer import PARTIAL_SUFFIX


def write_whole(path: Path, data: bytes) -> None:
    """Write `data` to a file beside `path`, which then takes its name.

    raises  OutputError when it can't be written; what had the name keeps it
    """
    partial = path.with_name(path.name + PARTIAL_SUFFIX)
    try:
        partial.write_bytes(data)
        partial.replace(path)
    except OSError as error:
        raise OutputError(f"{path}: can't be written ({error.strerror})") from error
