"""Help texts in the width of a terminal.

A description or an epilog is written like this:

    Prose, which is filled.

    a heading, and any number of these:
      name       what it is, which goes on
                 in deeper lines
      a line without a gap, kept apart from the next

    examples:
      a command --with options     what it is for

What follows `examples:` can be pasted into a shell at any width: a long command goes on behind a backslash
and is never broken within a word, and what it is for becomes a comment.
"""

from __future__ import annotations

import argparse
import re
import textwrap
from collections.abc import Iterator
from typing import Any

WIDTH = 100
"""Maximum width of help texts, in columns."""

EXAMPLES = "examples:"

_LONGEST_NAME = 30
_CONTINUED = " " * 6


class WrappingFormatter(argparse.HelpFormatter):
    """Help in WIDTH columns or fewer, with no name of an option or a file broken at a dash."""

    def __init__(self, prog: str, **choices: Any) -> None:
        super().__init__(prog, **choices)
        self._width = min(self._width, WIDTH)

    def _split_lines(self, text: str, width: int) -> list[str]:
        return _filled(" ".join(text.split()), width)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return "\n".join(_filled(" ".join(text.split()), width, indent, indent))


class HelpFormatter(WrappingFormatter):
    """The same for a description and an epilog with lists and examples."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return "\n".join(_lines(text, min(width, self._width)))


def _lines(text: str, width: int) -> Iterator[str]:
    heading = ""
    for item in _items(text):
        if not item.startswith(" "):
            heading = item
        depth = len(item) - len(item.lstrip())
        head, gap, tail = _split_at_gap(item) if depth else (item, "", "")
        if heading == EXAMPLES and depth:
            yield from _command(head, gap, tail, width)
        elif tail:
            yield from _named(head, gap, tail, width)
        else:
            yield from _filled(item.strip(), width, " " * depth, " " * depth) or [""]


def _items(text: str) -> Iterator[str]:
    """Yield paragraphs, indented lines together with deeper ones that go on from them, and empty lines."""
    item = ""
    for line in text.strip("\n").splitlines():
        depth, depth_of_item = (len(each) - len(each.lstrip()) for each in (line, item))
        goes_on = depth > depth_of_item if depth_of_item else depth == 0
        if item and line.strip() and goes_on:
            item = f"{item.rstrip()} {line.strip()}"
            continue
        if item:
            yield item
        item = line
        if not line.strip():
            yield ""
            item = ""
    if item:
        yield item


def _named(head: str, gap: str, tail: str, width: int) -> list[str]:
    """Return the lines of `  name   what it is`."""
    start = head + gap
    if len(start) > _LONGEST_NAME:
        return [head, *_filled(tail, width, _CONTINUED, _CONTINUED)]
    return _filled(tail, width, start, " " * len(start))


def _command(head: str, gap: str, tail: str, width: int) -> Iterator[str]:
    """Yield the lines of a command, and of the comment on what it is for."""
    comment = f"# {tail}" if tail else ""
    if len(head + gap + comment) <= width:
        yield head + gap + comment
        return
    words = re.findall(r"(?:[^\s'\"]|'[^']*'|\"[^\"]*\")+", head)
    line = "  " + words[0]
    for place, word in enumerate(words[1:], 2):
        backslash = 2 if place < len(words) else 0
        if len(line) + 1 + len(word) + backslash > width:
            yield f"{line} \\"
            line = _CONTINUED + word
        else:
            line += f" {word}"
    yield line
    if comment:
        yield from _filled(comment, width, _CONTINUED, f"{_CONTINUED}# ")


def _filled(text: str, width: int, first: str = "", others: str = "") -> list[str]:
    return textwrap.wrap(
        text, width, initial_indent=first, subsequent_indent=others,
        break_on_hyphens=False, break_long_words=False,
    )  # fmt: skip


def _split_at_gap(item: str) -> tuple[str, str, str]:
    """Split an item at the first gap of two blanks or more: the text before it, the gap, the rest."""
    match = re.fullmatch(r"(\s*\S.*?)(\s{2,})(\S.*)", item)
    return (match[1], match[2], match[3]) if match else (item, "", "")
