"""Words of strangers in Markdown: they stay words, and make no link, image, tag, table or heading."""

from __future__ import annotations

import os
import re
from urllib.parse import quote

from gguf_tools.text import shown

_MARKUP = re.compile(r"[\\`*\[\]!|~$#]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])")
_TAGS = {"<": "&lt;", ">": "&gt;", "&": "&amp;"}

_ADDRESS = re.compile(r"(?<=:)(?=//)|(?<=www)(?=\.)|(?=@)", re.IGNORECASE)
"""Places in what renderers take for an address, and make a link of, however it is escaped."""

_APART = "<!-- -->"


def as_markdown(text: str) -> str:
    """Write untrusted text so that Markdown shows it as it is, in a line, a table or a link's name."""
    return _escaped(shown(text))


def as_code(text: str) -> str:
    """Write untrusted text as code, or where code could not hold it, as text in the same way."""
    text = shown(text)
    escaped = _escaped(text)
    return f"`{text}`" if escaped.replace("\\_", "_") == text else escaped


def as_address(name: str) -> str:
    """Write the name of a file, which may be any bytes, as the address of a link."""
    return quote(os.fsencode(name))


def _escaped(text: str) -> str:
    escaped = _MARKUP.sub(r"\\\g<0>", _ADDRESS.sub("\0", text))
    return "".join(_TAGS.get(char, char) for char in escaped).replace("\0", _APART)
