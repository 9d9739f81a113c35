"""Reads the small JSON files beside a checkpoint's weights."""

from __future__ import annotations

import codecs
from pathlib import Path
from typing import Any

from gguf_tools.errors import BadConfig, CheckpointError
from gguf_tools.files.bounded_json import MAX_MEMORY, parse_json
from gguf_tools.files.named_files import read_input

MAX_BYTES = 64 << 20


def read_json_object(
    path: Path, error: type[CheckpointError] = BadConfig, *, most_memory: int = MAX_MEMORY
) -> dict[str, Any]:
    """Return the JSON object in `path`.

    most_memory  bytes that the object may take
    raises       `error` when the file can't be read, is not JSON, or holds something else than an object
    """
    data = read_input(path, MAX_BYTES, error)
    try:
        value = parse_json(data.removeprefix(codecs.BOM_UTF8), most_memory=most_memory)
    except ValueError as cause:  # UnicodeDecodeError and JSONDecodeError are ValueErrors
        raise error(f"{path}: not JSON: {cause}") from cause
    if not isinstance(value, dict):
        raise error(f"{path}: holds {type(value).__name__}, expected a JSON object")
    return value


def read_json_object_if_there(
    path: Path, error: type[CheckpointError] = BadConfig, *, most_memory: int = MAX_MEMORY
) -> dict[str, Any]:
    """Return the JSON object in `path`, or an empty one when there is no such file."""
    return read_json_object(path, error, most_memory=most_memory) if path.exists() else {}
