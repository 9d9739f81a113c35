"""JSON of unknown origin, read within bounds on memory and nesting.

JSON grows as it is read: `{},` takes three bytes in a text and seventy in memory.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

MAX_MEMORY = 160 << 20
"""Bytes that what a file says may take in memory, but for tokenizers."""

MAX_NESTING = 100

# What JSON becomes, in bytes at most; with a hook, the pairs of an object are in a list and in a dictionary.
_OBJECT_MEMORY = 200
_LIST_MEMORY = 72
_PAIR_MEMORY = 160
_ITEM_MEMORY = 50


def parse_json(
    data: bytes,
    objects: Callable[[list[tuple[str, Any]]], Any] | None = None,
    *,
    most_memory: int = MAX_MEMORY,
) -> Any:
    """Return the value of JSON in UTF-8.

    objects      makes an object of its pairs, as in json.loads
    most_memory  bytes that the value may take
    raises       ValueError for anything else, for JSON that would take more memory, and for lists and objects
                 nested deeper than MAX_NESTING
    """
    if not data.isascii():
        _check_memory(5 * len(data), most_memory)
    text = data.decode("utf-8")
    # The content is held as bytes, as one text, and as the texts in it, which a single \u widens throughout.
    in_texts = 4 * len(text) if b"\\u" in data else sys.getsizeof(text)
    _check_memory(
        len(data)
        + sys.getsizeof(text)
        + in_texts
        + _OBJECT_MEMORY * data.count(b"{")
        + _LIST_MEMORY * data.count(b"[")
        + _PAIR_MEMORY * data.count(b":")
        + _ITEM_MEMORY * data.count(b","),
        most_memory,
    )
    try:
        value = json.loads(text, object_pairs_hook=objects)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    if data.count(b"[") + data.count(b"{") > MAX_NESTING:
        _check_nesting(value)
    return value


_TOO_DEEP = f"lists and objects are nested deeper than {MAX_NESTING}"


def _check_nesting(value: Any) -> None:
    """Raise ValueError for nesting in which a recursive reader could exhaust the stack."""
    level = [value]
    for _ in range(MAX_NESTING + 1):
        level = [
            item
            for holder in level
            if isinstance(holder, dict | list)
            for item in (holder.values() if isinstance(holder, dict) else holder)
        ]
        if not level:
            return
    raise ValueError(_TOO_DEEP)


def _check_memory(n_bytes: int, most: int) -> None:
    if n_bytes > most:
        raise ValueError(f"would take more than {most >> 20} MiB of memory")
