"""Reading a model card: the YAML between two lines `---` on top of README.md."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

_NULLS = frozenset(("", "~", "null", "Null", "NULL"))


def read_model_card(path: Path) -> tuple[dict[str, Any], str | None]:
    """Return the card's entries, and a note when there is a card that can't be read.

    Values are texts, lists or objects of texts: nothing is guessed to be a number, a date or a truth
    value, so the language code `no` stays `no`. Entries without a value are left out.
    """
    if not path.is_file():
        return {}, None
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
        if not lines or lines[0] != "---" or "---" not in lines[1:]:
            return {}, None
        # Cards with tabs exist, and YAML forbids them.
        front_matter = "\n".join(lines[1 : lines.index("---", 1)]).replace("\t", "  ")
        entries = yaml.load(front_matter, Loader=yaml.BaseLoader)  # builds texts, lists and dicts only
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as cause:
        reason = " ".join(str(cause).split())
        return {}, f"{path.name}: the model card is ignored: {reason}"
    if entries is None:
        return {}, None
    if not isinstance(entries, dict):
        return {}, f"{path.name}: the model card is ignored: it holds no entries `key: value`"
    return {key: value for key, value in entries.items() if not _is_null(value)}, None


def _is_null(value: object) -> bool:
    return isinstance(value, str) and value in _NULLS
