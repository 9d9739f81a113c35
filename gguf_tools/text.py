"""Text for terminals, made from untrusted contents of files, and the way out of all text that is printed.

There a text loses what would control a terminal. Names and texts of strangers are in many lines, so none is
printed but through here. Bars and pages, which
are drawn, and tables, whose columns would be as wide as the escapes, call `printable` themselves.
"""

from __future__ import annotations

import difflib
import json
import math
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from html import escape
from typing import Any, TextIO

MAX_CHARS = 80
MAX_EXACT = 1 << 53
"""Largest number up to which JavaScript, whose numbers are floats, has all whole numbers."""

MAX_WIDTH = 100
"""Maximum width of a line where names leave room, and of a column: a longer cell sticks out instead of
widening the others."""


def printable(text: str) -> str:
    r"""Return `text` with escapes for what would control a terminal, end a line or turn its direction.

    These are all characters that are not printable: C0 and C1 controls, marks of direction and of no width,
    separators of lines and paragraphs, blanks other than the usual one, and surrogates.

    >>> print(printable("a\x1b[31m\u202e\n"))
    a\x1b[31m\u202e\n
    """
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def cut_short(text: str, limit: int = MAX_CHARS) -> str:
    """Return `text` escaped, and cut to `limit` characters: a name, or what a library says of a file."""
    return printable(text[:limit]) + ("..." if len(text) > limit else "")


def html_text(text: str) -> str:
    """Return the same for HTML, in which it makes no tag."""
    return escape(printable(text))


def shown(text: str) -> str:
    """Return `text` as it is, or as `quoted` if it does not fit on one line of a message."""
    return text if len(text) <= MAX_WIDTH and text.isprintable() else quoted(text)


def quoted(value: object, limit: int = MAX_CHARS) -> str:
    """Return a value of a stranger's file as a message shows it: on one line, escaped, and cut short.

    A text is in quotes. Lists and objects are written only as far as they are shown: one that holds itself,
    or a million others by aliases, costs no more than a short one.

    limit  characters of the value that are shown at most

    >>> quoted(["x"] * 100, 20)
    "['x', 'x', 'x', 'x',..."
    >>> quoted(10**5000)
    'a number of 16610 bits'
    """
    if isinstance(value, str):
        return repr(value[:limit]) + ("..." if len(value) > limit else "")
    text = ""
    for piece in _pieces(value, limit):
        text += piece
        if len(text) > limit:
            return f"{text[:limit]}..."
    return text


_HALF = re.compile("[\ud800-\udfff]")


def is_whole(text: str) -> bool:
    """Whether a text has no halves of characters (lone surrogates), which no encoding can write."""
    return text.isascii() or _HALF.search(text) is None


def _pieces(value: object, limit: int) -> Iterator[str]:
    """Yield a value's text in pieces, of which each is short, and the last is the end."""
    if isinstance(value, dict):
        yield "{"
        for number, (key, item) in enumerate(value.items()):
            yield ", " if number else ""
            yield from _pieces(key, limit)
            yield ": "
            yield from _pieces(item, limit)
        yield "}"
    elif isinstance(value, list | tuple):
        yield "[" if isinstance(value, list) else "("
        for number, item in enumerate(value):
            yield ", " if number else ""
            yield from _pieces(item, limit)
        yield "]" if isinstance(value, list) else ",)" if len(value) == 1 else ")"
    elif isinstance(value, str | bytes):
        yield repr(value[: limit + 1]) if isinstance(value, bytes) else quoted(value, limit)
    elif value is None or isinstance(value, bool):
        yield {None: "null", True: "true", False: "false"}[value]
    elif isinstance(value, int) and value.bit_length() > 4 * limit:
        yield f"a number of {value.bit_length()} bits"  # Python refuses to write some, or is slow
    else:
        yield printable(repr(value))


def table(rows: Sequence[Sequence[str]], *, right: Sequence[int] = (), gap: int = 2) -> list[str]:
    """Return lines with aligned columns; those in `right` are flush right, the last is never padded."""
    printed = [[printable(cell) for cell in row] for row in rows]
    widths = [min(max(map(len, column)), MAX_WIDTH) for column in zip(*printed, strict=True)]
    lines = []
    for row in printed:
        cells = [
            cell.rjust(width) if index in right else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append((" " * gap).join(cells).rstrip())
    return lines


def html_table(caption: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table for notebooks."""
    lines = [
        "".join(f"<{tag}>{html_text(cell)}</{tag}>" for cell in row)
        for tag, group in (("th", [heads]), ("td", rows))
        for row in group
    ]
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f"<table><caption>{html_text(caption)}</caption>{body}</table>"


def json_text(data: Any) -> str:
    """Return `data` as JSON in ASCII, of numbers that every reader has exactly; see `for_json`."""
    return json.dumps(for_json(data), indent=2, allow_nan=False)


def json_line(data: Any) -> str:
    """Return the same on one line."""
    return json.dumps(for_json(data), allow_nan=False)


def for_json(data: Any) -> Any:
    """Return `data` with strings in place of some numbers.

    These are the ones that JSON lacks ("nan", "inf" and "-inf") and whole numbers above MAX_EXACT.
    """
    if isinstance(data, float) and not math.isfinite(data):
        return str(data)
    if isinstance(data, int) and abs(data) > MAX_EXACT:
        return str(data)
    if isinstance(data, dict):
        return {key: for_json(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [for_json(item) for item in data]
    return data


def size_text(n_bytes: float) -> str:
    """Return a rounded size: 1536 -> "1.50 KiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if n_bytes < 1024:
            return f"{n_bytes:.0f} {unit}" if unit == "B" else f"{n_bytes:.2f} {unit}"
        n_bytes /= 1024
    return f"{n_bytes:.2f} TiB"


def bytes_text(n_bytes: int) -> str:
    """Return a size: "1,234 bytes", followed by a rounded size where that is easier to read."""
    exact = f"{n_bytes:,} bytes"
    return exact if n_bytes < 1 << 20 else f"{exact} ({size_text(n_bytes)})"


def counted(number: int, noun: str) -> str:
    """Write a number with its noun, in the plural unless it is 1.

    >>> [counted(1, "file"), counted(12, "file"), counted(1200, "entry")]
    ['1 file', '12 files', '1,200 entries']
    """
    if number == 1:
        return f"1 {noun}"
    plural = f"{noun[:-1]}ies" if noun.endswith("ry") else f"{noun}s"
    return f"{number:,} {plural}"


def first_of(texts: Sequence[str], most: int, more: str = "more") -> str:
    """Write the first few of several texts with commas between them, and how many more there are.

    >>> first_of(["a", "b", "c"], 2)
    'a, b and 1 more'
    """
    n_more = len(texts) - most
    return ", ".join(texts[:most]) + (f" and {n_more} {more}" if n_more > 0 else "")


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Write "; did you mean NAME?" for the name nearest to `word`, "" if none is near.

    Case and the kind of dashes do not count: Q4_KM is near to Q4_K_M, and q4-k-m is nearer. The beginning of
    some names stands for the first of them: q5 is near to Q5_0, Q5_1 and others.
    """
    shape, by_shape = _shape(word[:MAX_CHARS]), {_shape(name): name for name in known}
    near = difflib.get_close_matches(shape, by_shape, n=1, cutoff=0.7)
    if not near and len(shape) > 1:
        near = [each for each in by_shape if each.startswith(shape)][:_MOST_NEAR]
    *first, last = [by_shape[each] for each in near] or [""]
    return f"; did you mean {' or '.join(filter(None, [', '.join(first), last]))}?" if near else ""


_MOST_NEAR = 4


def _shape(name: str) -> str:
    return name.upper().replace("-", "_")


_LAYER = re.compile(r"blk\.(\d+)")


def in_layer_ranges(names: Iterable[str]) -> list[str]:
    """Return `names` in a form for people: names that differ only in the layer become one.

    >>> in_layer_ranges(["output.weight", "blk.0.attn_q.weight", "blk.1.attn_q.weight"])
    ['output.weight', 'blk.0-1.attn_q.weight']
    """
    layers: dict[str, list[int]] = {}
    for name in names:
        match = _LAYER.match(name)
        numbers = layers.setdefault(_LAYER.sub("blk.{}", name, count=1) if match else name, [])
        if match:
            numbers.append(int(match[1]))
    return [
        name.replace("{}", number_ranges(sorted(numbers)), 1) if numbers else name
        for name, numbers in layers.items()
    ]


def number_ranges(numbers: Sequence[int]) -> str:
    """Write sorted numbers as ranges.

    >>> number_ranges([0, 1, 2, 5])
    '0-2,5'
    """
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][-1] + 1:
            spans[-1][1:] = [number]
        else:
            spans.append([number])
    return ",".join("-".join(map(str, span)) for span in spans)


def say(*lines: str) -> None:
    """Print lines on standard output; a line end within one is escaped, like all that controls a terminal."""
    _write(sys.stdout, lines)


def say_json(data: Any) -> None:
    """Print `data` as JSON on standard output."""
    say(*json_text(data).split("\n"))


def say_aside(*lines: str) -> None:
    """Print lines on standard error, in the same way; where it can't be written, they are not missed."""
    with suppress(OSError):
        _write(sys.stderr, lines)


def has_terminal() -> bool:
    """Whether standard error is a terminal, so that a line may change on it."""
    return sys.stderr is not None and sys.stderr.isatty()


def _write(stream: TextIO | None, lines: tuple[str, ...]) -> None:
    # Without a standard error, print would take standard output. A program without windows has neither.
    if stream is not None and lines:
        stream.write("".join(f"{printable(line)}\n" for line in lines))
        stream.flush()
