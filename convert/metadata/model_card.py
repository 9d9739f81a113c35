"""Reads a model card: the YAML between two lines `---` on top of README.md."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from gguf_tools.errors import BadConfig
from gguf_tools.files.named_files import read_input

MAX_BYTES = 8 << 20
MAX_ENTRY_BYTES = 1 << 17
"""Maximum size of the YAML part, for which its reader takes a second."""

_NULLS = frozenset(("", "~", "null", "Null", "NULL"))


def read_model_card(path: Path) -> tuple[dict[str, Any], str | None]:
    """Return the card's entries, and a note when there is a card that can't be read.

    Values are texts, lists or objects of texts: nothing is guessed to be a number, a date or a truth
    value, so the language code `no` stays `no`. Entries without a value are left out.
    """
    if not path.is_file():
        return {}, None
    try:
        lines = read_input(path, MAX_BYTES, BadConfig).decode("utf-8-sig").splitlines()
        if not lines or lines[0] != "---" or "---" not in lines[1:]:
            return {}, None
        # Some cards contain tabs, which YAML forbids.
        front_matter = "\n".join(lines[1 : lines.index("---", 1)]).replace("\t", "  ")
        if len(front_matter) > MAX_ENTRY_BYTES:
            return {}, f"{path.name}: the model card is ignored: entries of more than {MAX_ENTRY_BYTES} bytes"
        entries = yaml.load(front_matter, Loader=yaml.BaseLoader)  # builds texts, lists and dicts only
    except (BadConfig, RecursionError, ValueError, OverflowError, yaml.YAMLError) as cause:
        # Text that is not UTF-8, or escapes of characters that don't exist.
        return {}, f"{path.name}: the model card is ignored: {' '.join(str(cause).split())}"
    if entries is None:
        return {}, None
    if not isinstance(entries, dict):
        return {}, f"{path.name}: the model card is ignored: it holds no entries `key: value`"
    return {key: value for key, value in entries.items() if not _is_null(value)}, None


def _is_null(value: object) -> bool:
    return isinstance(value, str) and value in _NULLS
