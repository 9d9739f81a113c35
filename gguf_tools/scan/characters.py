"""Characters that deceive: those that move a cursor, hide, turn text around, or look like others."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator

from gguf_tools.findings import Level

# What terminals act upon, or readers do not see. Line breaks and tabs are left out.
_DECEIVING = re.compile(
    "[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f"
    "\u00ad\u115f\u1160\u180e\u200b-\u200f\u202a-\u202e\u2060-\u2069\u3164\ufeff\uffa0"
    "\U000e0000-\U000e007f\U000e0100-\U000e01ef]"
)
_NOT_UTF8 = re.compile("[\udc80-\udcff]")
_ESCAPES = "\x1b\x9b"
_TURNING = frozenset("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
_JOINING = frozenset("\u200c\u200d\u200e\u200f")

# Letters that are drawn as Latin ones; NFKC has already joined full-width and mathematical letters.
_LOOKALIKES = str.maketrans(
    "аеорсухіјѕԁһԛԝкмтвнɡαορντκιυωɩ‐‑‒–—−․ꓸ",
    "aeopcyxijsdhqwkmtbhgaopvtkiuwi------..",
)


def deceiving_characters(text: str) -> Iterator[tuple[Level, str]]:
    """Yield each sort of deceiving character in `text`: how bad it is in a text for people, and a phrase."""
    sorts: dict[tuple[Level, str], list[str]] = {}
    for match in _DECEIVING.finditer(text):
        sorts.setdefault(_sort_of(match[0]), []).append(match[0])
    if odd_bytes := _NOT_UTF8.findall(text):
        sorts[Level.WARNING, "bytes that are not UTF-8"] = odd_bytes
    for (level, phrase), found in sorts.items():
        yield level, f"{phrase} ({ascii(found[0])[1:-1]}, {len(found):,} in all)"


def _sort_of(char: str) -> tuple[Level, str]:
    if char in _ESCAPES:
        return Level.BAD, "terminal escape sequences"
    if ord(char) < 0xA0:
        return Level.WARNING, "control characters"
    if char in _TURNING:
        return Level.BAD, "characters that turn the direction of text"
    if char >= "\U000e0000":
        return Level.BAD, "invisible characters that spell a hidden text"
    if char in _JOINING:
        return Level.NOTE, "zero-width joiners or direction marks"
    return Level.WARNING, "invisible characters"


def hidden_text(text: str) -> str:
    """Return the ASCII text that invisible tag characters spell, "" without any."""
    return "".join(chr(ord(char) - 0xE0000) for char in text if 0xE0020 <= ord(char) < 0xE007F)


def skeleton(name: str) -> str:
    """Return `name` as a hasty reader sees it: equal for names that look alike.

    >>> skeleton("general.nаme") == skeleton("General.name\\u200b")  # the first a is Cyrillic
    True
    """
    if name.isascii() and name.isprintable():
        return name.lower().replace(" ", "")
    seen = _DECEIVING.sub("", unicodedata.normalize("NFKC", name)).casefold()
    return "".join(seen.split()).translate(_LOOKALIKES)
