"""Reading the small JSON files that lie beside a checkpoint's weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gguf_tools.errors import BadConfig, CheckpointError


def read_json_object(path: Path, error: type[CheckpointError] = BadConfig) -> dict[str, Any]:
    """Return the JSON object in `path`.

    raises  `error` when the file can't be read, is not JSON, or holds something else than an object
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as cause:
        raise error(f"{path}: can't be read: {cause.strerror or cause}") from cause
    except (ValueError, RecursionError) as cause:  # UnicodeDecodeError and JSONDecodeError are ValueErrors
        raise error(f"{path}: not JSON: {cause}") from cause
    if not isinstance(value, dict):
        raise error(f"{path}: holds {type(value).__name__}, expected a JSON object")
    return value


def read_json_object_if_there(path: Path, error: type[CheckpointError] = BadConfig) -> dict[str, Any]:
    """Return the JSON object in `path`, or an empty one when there is no such file."""
    return read_json_object(path, error) if path.is_file() else {}
