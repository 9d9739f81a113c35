"""Command lines in a card: one line each, that a shell takes and that an older card is read by."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence

_ODD = "$'"
"""The beginning of a word with escapes, which bash and others know."""

_WORD = re.compile(r"""(?:\$'(?:\\.|[^'\\])*'|'[^']*'|"[^"]*"|[^\s'"])+""")
_ESCAPE = re.compile(r"\\(?:x([0-9a-f]{2})|u([0-9a-f]{4})|U([0-9a-f]{8})|(.))")


def command_line(words: Sequence[str]) -> str:
    """Write the words of a command for a shell."""
    return " ".join(map(shell_word, words))


def shell_word(word: str) -> str:
    r"""Write a word for a shell; one with line ends or the like as $'a\x0ab', which stays on its line."""
    return shlex.quote(word) if word.isprintable() else _in_one_line(word)


def comment(text: str) -> str:
    """Write a text as a comment of one line."""
    return f"# {text if text.isprintable() and not text.startswith(_ODD) else _in_one_line(text)}"


def read_comment(line: str) -> str | None:
    """Return the text of `comment`; None for a line that is none."""
    if not line.startswith("# "):
        return None
    return _read_word(line[2:]) if line[2:].startswith(_ODD) else line[2:]


def _in_one_line(text: str) -> str:
    return f"{_ODD}{''.join(map(_escaped, text))}'"


def _escaped(char: str) -> str:
    code = ord(char)
    if char in "\\'":
        return f"\\{char}"
    if char.isprintable():
        return char
    if 0xDC80 <= code <= 0xDCFF:  # a byte of a file's name that is no UTF-8
        return f"\\x{code - 0xDC00:02x}"
    return f"\\x{code:02x}" if code < 0x80 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def read_command_line(line: str) -> list[str]:
    """Return the words of `command_line`; raises ValueError for a line that a person broke."""
    if _WORD.sub("", line).strip():
        raise ValueError(f"no command line: {line}")
    return [_read_word(word) for word in _WORD.findall(line)]


def _read_word(word: str) -> str:
    if word.startswith(_ODD):
        return _ESCAPE.sub(_unescaped, word[2:-1])
    (read,) = shlex.split(word) or [""]
    return read


def _unescaped(match: re.Match[str]) -> str:
    byte, short, long, itself = match.groups()
    if byte is not None:
        code = int(byte, 16)
        return chr(code if code < 0x80 else code + 0xDC00)
    return itself if itself is not None else chr(int(short or long, 16))
