"""Text and tables of metadata values and tensors, for terminals and notebooks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from gguf_tools.format.tensors import TensorInfo
from gguf_tools.format.values import Kind, Value
from gguf_tools.text import MAX_CHARS, html_table

MAX_ITEMS = 6
"""Items of an array that are shown at most."""


def value_text(value: Value, *, full: bool = False, width: int | None = None) -> str:
    """Return a metadata value on one line; long arrays and strings are cut short unless `full`.

    width  characters that it should take at most; None: what comes of MAX_ITEMS and MAX_CHARS
    """
    if width is None or full:
        return _value_text(value, MAX_ITEMS, full=full)
    texts = (_value_text(value, n_items) for n_items in range(MAX_ITEMS, 0, -1))
    return next((text for text in texts if len(text) <= width), None) or _cut(_value_text(value, 1), width)


def _cut(text: str, width: int) -> str:
    """Return the beginning of a text, and its end, which says how much there is."""
    end = text[text.rindex("... ") :] if "... " in text else "..."
    return f"{text[: max(0, width - len(end))]}{end}" if len(text) > width else text


def _value_text(value: Value, n_items: int, *, full: bool = False) -> str:
    if value.kind is not Kind.ARRAY:
        return _scalar_text(value.data, full)
    shown = value.data if full else value.data[:n_items]
    if value.item is not Kind.ARRAY:
        items = [_scalar_text(item, full) for item in shown]
    elif full:
        items = [_value_text(item, n_items, full=True) for item in shown]
    else:
        items = [f"[{len(item.data):,} items]" for item in shown]
    if len(shown) < len(value.data):
        items.append(f"... {len(value.data):,} in all")
    return f"[{', '.join(items)}]"


def _scalar_text(data: Any, full: bool) -> str:
    if isinstance(data, str):
        if full or len(data) <= MAX_CHARS:
            return repr(data)
        return f"{data[:MAX_CHARS]!r}... {len(data):,} characters"
    if isinstance(data, float):
        return f"{data:.8g}"  # float32 has no more digits that mean something
    return str(data)


def types_table(caption: str, tensors: Iterable[TensorInfo]) -> str:
    """Return a table for notebooks: how many tensors there are of each type, and what they take."""
    totals: dict[str, list[int]] = {}
    for info in tensors:
        total = totals.setdefault(info.type.name, [0, 0])
        total[0] += 1
        total[1] += info.n_bytes
    rows = [(name, f"{count:,}", f"{n_bytes:,}") for name, (count, n_bytes) in totals.items()]
    return html_table(caption, ("type", "tensors", "bytes"), rows)
