"""Escapes for what a terminal would take for more than text; no module of ours is needed."""

from __future__ import annotations


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
