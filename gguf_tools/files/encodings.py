"""Guesses of the encoding of a text that is not UTF-8."""

from __future__ import annotations

import shlex
import unicodedata
from collections import Counter

_MARKS = (
    (b"\xff\xfe\x00\x00", "UTF-32"), (b"\x00\x00\xfe\xff", "UTF-32"),
    (b"\xff\xfe", "UTF-16"), (b"\xfe\xff", "UTF-16"),
)  # fmt: skip
_SCRIPTS = {
    "SHIFT_JIS": ("HIRAGANA", "KATAKANA"), "EUC-JP": ("HIRAGANA", "KATAKANA"), "EUC-KR": ("HANGUL",),
    "GB18030": ("CJK",), "BIG5": ("CJK",), "WINDOWS-1251": ("CYRILLIC SMALL",), "KOI8-R": ("CYRILLIC SMALL",),
}  # fmt: skip
"""Encodings by their names for iconv -> how the names of most characters in them begin."""

_ZEROS = {
    "UTF-32LE": (0, 1, 1, 1), "UTF-32BE": (1, 1, 1, 0), "UTF-16LE": (0, 1, 0, 1), "UTF-16BE": (1, 0, 1, 0),
}  # fmt: skip
"""Which of four bytes are mostly 0 in a text of mostly ASCII."""

_LOOKED_AT = 1 << 16
_MANY = 0.3


def encoding_of(data: bytes) -> str | None:
    """Return the encoding that a text which is no plain UTF-8 text looks like, by its name for iconv.

    None for bytes that look like no text.
    """
    head = data[:_LOOKED_AT]
    marked = next((name for mark, name in _MARKS if data.startswith(mark)), None)
    if marked is not None or not head:
        return marked
    zeros = [head[place::4].count(0) / max(1, len(head[place::4])) for place in range(4)]
    for name, pattern in _ZEROS.items():
        if all(share > 0.5 if zero else share < 0.1 for share, zero in zip(zeros, pattern, strict=True)):
            return name
    if any(byte < 32 and byte not in b"\t\n\r\f\x1b" for byte in head):
        return None
    high = [byte for byte in head if byte >= 0x80]
    if len(high) < _MANY * len(head):
        return "WINDOWS-1252" if any(byte < 0xA0 for byte in high) else "ISO-8859-1"
    shares = {name: _share(head, name) for name in _SCRIPTS}
    best = max(shares, key=lambda name: shares[name])
    return best if shares[best] > _MANY else None


def _share(head: bytes, name: str) -> float:
    """Return the share of characters beyond ASCII that are of the scripts that an encoding is for.

    Kana count twice: half of a Japanese text is Chinese characters.
    """
    try:
        text = head[: len(head) - len(head) % 2].decode(name)
    except UnicodeDecodeError as error:
        if error.start < len(head) - 4:  # otherwise the last character is cut in two
            return 0.0
        text = head[: error.start].decode(name)
    others = Counter(char for char in text if not char.isascii())
    of_script = sum(n for char, n in others.items() if unicodedata.name(char, "").startswith(_SCRIPTS[name]))
    return of_script * (2 if "HIRAGANA" in _SCRIPTS[name] else 1) / max(1, others.total())


def remedy_for(path: str, data: bytes) -> str:
    """Say what a text looks like that is not UTF-8, and the command that converts it."""
    name = encoding_of(data)
    if name is None:
        return "expected a text"
    quoted = shlex.quote(path)
    return f"it looks like {name}: iconv -f {name} -t UTF-8 {quoted} > {shlex.quote(path + '.utf8')}"
