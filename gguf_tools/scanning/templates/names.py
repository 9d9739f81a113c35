"""Names that lead out of a template, and the search for them in plain text."""

from __future__ import annotations

import re
from collections.abc import Iterator

from gguf_tools.findings import Finding, Level, listed
from gguf_tools.text import quoted

CHECK = "template"

_DUNDER = re.compile(r"__[a-zA-Z]\w*?__")
_PATH_WITH_DUNDER = re.compile(r"(?:\w+\.)*__[a-zA-Z]\w*?__(?:\.\w+)*")
_FIELD_WITH_DUNDER = re.compile(r"\{[^{}]{0,200}[.\[]\s*_+[a-zA-Z]")
_FIELD_WITH_ATTRIBUTE = re.compile(r"\{\w*(?:\.\w+|\[\w+\])[^{}]{0,200}\}")

# Attributes of functions, frames, generators and types, by which the interpreter's insides are reached.
_INSIDES = frozenset((
    "mro", "func_globals", "func_code", "func_closure", "func_defaults", "func_dict", "im_func", "im_self",
    "im_class", "gi_frame", "gi_code", "gi_yieldfrom", "cr_frame", "cr_code", "cr_await", "ag_frame",
    "ag_code", "tb_frame", "tb_next", "f_back", "f_builtins", "f_globals", "f_locals", "f_code",
    "co_consts", "co_names", "co_code", "eval_ctx", "environment",
))  # fmt: skip

_BLOCK = re.compile(r"\{%.*?%\}|\{\{.*?\}\}", re.DOTALL)
_ESCAPED_CHAR = re.compile(r"\\x([0-9a-fA-F]{2})|\\u([0-9a-fA-F]{4})|\\([0-7]{3})")
_ATTR_FILTER = re.compile(r"\|\s*attr\b")
_LOADS = re.compile(r"\{%[-+]?\s*(?:import|from|include|extends)\b")


def leads_out(name: str) -> bool:
    """Whether an attribute of this name belongs to the interpreter, not to a conversation."""
    return name in _INSIDES or bool(_DUNDER.fullmatch(name)) or name.startswith(("_TemplateReference", "__"))


def dunder_in(text: str) -> tuple[Level, str] | None:
    """Return how bad it is that a constant holds a name like __class__, and a phrase; None without one."""
    if _FIELD_WITH_DUNDER.search(text):
        return Level.BAD, f"a format string reaches for insides: {quoted(text)}"
    if _PATH_WITH_DUNDER.fullmatch(text.strip()):
        return Level.BAD, f"names {quoted(text)}"
    if _DUNDER.search(text):
        return Level.WARNING, f"a text names {', '.join(sorted(set(_DUNDER.findall(text)))[:5])}"
    return None


def has_format_field(text: str) -> bool:
    """Whether `text`, as a format string, would look up attributes or items: {0.name}, {x[0]}."""
    return bool(_FIELD_WITH_ATTRIBUTE.search(text))


def search_text(key: str, template: str) -> Iterator[Finding]:
    """Report what a search finds between {{ and }} and {% and %}, where there is no parser."""
    blocks = [_unescaped(block) for block in _BLOCK.findall(template)]
    if found := sorted({name for block in blocks for name in _DUNDER.findall(block)}):
        yield Finding(CHECK, f"names {listed(found)}", Level.BAD, (key,))
    if any(map(_ATTR_FILTER.search, blocks)):
        yield Finding(CHECK, "uses the filter attr, which reaches for any attribute", Level.WARNING, (key,))
    if any(map(_LOADS.match, blocks)):
        yield Finding(CHECK, "loads other templates", Level.BAD, (key,))


def _unescaped(code: str) -> str:
    """Return `code` with the escapes of string constants replaced by what they stand for."""

    def char(match: re.Match[str]) -> str:
        return chr(int(match[1] or match[2], 16) if match[1] or match[2] else int(match[3], 8))

    return _ESCAPED_CHAR.sub(char, code)
