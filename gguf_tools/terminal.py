"""Printing: the way out of all text, where it loses what would control a terminal.

Names and texts of strangers are in many lines, so none is printed but through here. Bars and pages, which
are drawn, and tables, whose columns would be as wide as the escapes, call `printable` themselves.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import Any, TextIO

from gguf_tools.text import json_text, printable


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
