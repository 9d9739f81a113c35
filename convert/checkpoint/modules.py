"""Reads modules.json of sentence-transformers: what a text goes through, in order."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from convert.checkpoint.checkpoint import MAX_BYTES
from gguf_tools.errors import BadConfig
from gguf_tools.files.documents import parse_json
from gguf_tools.files.named_files import read_input
from gguf_tools.text import shown

MODULES_NAME = "modules.json"
DENSE = "Dense"
"""Kind of a module that multiplies a vector by a matrix."""


def read_modules(path: Path) -> Iterator[tuple[str, str]]:
    """Yield the kind of each module, the last part of its type, and the folder with its files.

    raises  BadConfig for a file that can't be read, or is no such list
    """
    try:
        entries = parse_json(read_input(path, MAX_BYTES, BadConfig))
        modules = [("" + entry["type"], "" + entry.get("path", "")) for entry in entries]
    except (AttributeError, KeyError, TypeError, ValueError) as cause:
        raise BadConfig(f"{path}: is no list of modules with type and path") from cause
    for type_, place in modules:
        inside = PurePosixPath(place)
        if inside.is_absolute() or ".." in inside.parts or "\\" in place or "\0" in place:
            raise BadConfig(f"{path}: path is {shown(repr(place))}, expected a folder beside the file")
        yield type_.rpartition(".")[2], place
