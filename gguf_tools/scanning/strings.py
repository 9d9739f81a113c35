"""Texts in a header: characters and names that deceive, and metadata with links, paths or secrets.

Tokens and merges are not read: vocabularies hold every byte, and every link, on purpose.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Literal

from gguf_tools.findings import Finding, Level, listed
from gguf_tools.format import keys
from gguf_tools.format.header import MAX_NAME_BYTES
from gguf_tools.format.values import Kind, Metadata, Value, bytes_of
from gguf_tools.text import MAX_CHARS, quoted

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


_MAX_KEY_BYTES = 256
_MAX_TEXT_CHARS = 1 << 20
_MAX_TOKEN_CHARS = 4096
_MAX_TEXTS = 10_000
_TOKENIZER_FILE = "tokenizer.huggingface.json"  # a whole tokenizer.json, which some converters put there

_KNOWN_KEYS = frozenset(
    value
    for name, value in vars(keys).items()
    if name.isupper() and isinstance(value, str) and "{" not in value
)
_LINK_KEY = re.compile(r"general\.(\w+\.)*(\d+\.)?(url|repo_url|doi|link)", re.ASCII)

_LINK = re.compile(r"\b([a-zA-Z][a-zA-Z0-9+.-]{1,15})://[^\s'\"<>\\]{1,300}")
_LOGIN_IN_LINK = re.compile(r"://[^/@\s:]{1,80}:[^/@\s]{1,80}@")
_UNC = re.compile(r"(?<![\\\w])\\\\[\w.-]{2,80}\\[\w$.-]{1,80}")
_LOCAL_PATH = re.compile(
    r"(?<![\w/.:~-])/(?:home|Users|root|mnt|media|data|workspace|tmp|opt|srv|var|scratch)/[^\s'\"<>]{1,200}"
    r"|(?<![\w])[A-Za-z]:\\[^\s'\"<>]{1,200}"
)
_SHELL = re.compile(
    r"\b(?:curl|wget)\b[^\n]{0,200}\|\s{0,4}(?:ba|z)?sh\b|\brm\s{1,4}-[rf]{1,2}\b|\$\([^)\n]{1,80}\)"
    r"|\bpowershell(?:\.exe)?\b|\bcmd\.exe\b|/bin/(?:ba|z)?sh\b|\bos\.system\b|\b__import__\b|\bsubprocess\.\w",
    re.IGNORECASE,
)
_SECRETS = {
    "an AWS access key": re.compile(r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b"),
    "a private key": re.compile(r"-----BEGIN [A-Z ]{0,30}PRIVATE KEY-----"),
    "a Hugging Face token": re.compile(r"\bhf_[A-Za-z0-9]{30,40}\b"),
    "a GitHub token": re.compile(r"\bgh[pousr]_[A-Za-z0-9]{36}\b|\bgithub_pat_\w{22,100}"),
    "an API key": re.compile(r"\bsk-[A-Za-z0-9_-]{20,100}\b|\bAIza[0-9A-Za-z_-]{35}\b"),
    "a Slack token": re.compile(r"\bxox[abprs]-[0-9A-Za-z-]{10,80}"),
    "a web token": re.compile(r"\beyJ[\w-]{10,500}\.eyJ[\w-]{10,500}\."),
}


def check_names(names: Iterable[str], what: Literal["key", "tensor"]) -> Iterator[Finding]:
    """Report names of keys or tensors that deceive the eye, a terminal, or llama.cpp."""
    max_bytes = _MAX_KEY_BYTES if what == "key" else MAX_NAME_BYTES
    alike: dict[str, list[str]] = {}
    for name in names:
        for level, phrase in deceiving_characters(name):
            yield Finding("name", f"a {what} with {phrase}", max(level, Level.WARNING), (name,))
        if len(bytes_of(name)) > max_bytes:
            text = f"a {what} of {len(bytes_of(name)):,} bytes, expected at most {max_bytes}"
            yield Finding("name", text, Level.WARNING if what == "key" else Level.BAD, (name[:max_bytes],))
        elif not name.isascii():
            text = f"a {what} with letters outside of ASCII: {_shown(name)}"
            yield Finding("name", text, Level.WARNING, (name,))
        alike.setdefault(skeleton(name), []).append(name)
    for seen, twins in alike.items():
        if len(twins) > 1:
            level = Level.WARNING if all(map(str.isascii, twins)) else Level.BAD
            text = f"{len(twins)} {what}s look alike: {', '.join(map(_shown, twins[:5]))}"
            yield Finding("look-alike", text, level, (twins[0],))
        elif what == "key" and seen in _KNOWN_KEYS and twins[0] != seen:
            text = f"looks like the key {seen}, but is {_shown(twins[0])}"
            yield Finding("look-alike", text, Level.BAD, (twins[0],))


def _shown(name: str) -> str:
    """Return a name with escapes for everything outside of ASCII, so that it looks like no other."""
    return ascii(name[:MAX_CHARS])


def check_texts(metadata: Metadata) -> Iterator[Finding]:
    """Report what is odd about the texts in metadata."""
    links = []
    for where, text in texts_of(metadata):
        yield from _check_characters(where, text)
        if len(text) > _MAX_TEXT_CHARS and where != _TOKENIZER_FILE:
            yield Finding("huge", f"a text of {len(text):,} characters", Level.WARNING, (where,))
        is_link = _LINK_KEY.fullmatch(where) is not None
        if is_link:
            links.append(f"{where} {quoted(text)}")
        if where != _TOKENIZER_FILE:
            contents = _check_contents(where, text[:_MAX_TEXT_CHARS])
            yield from (finding for finding in contents if not (is_link and finding.kind == "links"))
    if links:
        yield Finding("links", f"links of the model's maker: {', '.join(links[:20])}", Level.NOTE)
    yield from _check_sizes(metadata)


def texts_of(metadata: Metadata) -> Iterator[tuple[str, str]]:
    """Yield (key, text) of all texts but the vocabulary's; the first items of arrays come as key[index]."""
    for key, value in metadata.items():
        if value.kind is Kind.STRING:
            yield key, value.data
        elif value.kind is Kind.ARRAY and not key.startswith("tokenizer.ggml."):
            yield from islice(_texts_in(key, value), _MAX_TEXTS)


def _texts_in(key: str, value: Value) -> Iterator[tuple[str, str]]:
    todo = [(key, value)]
    while todo:
        where, array = todo.pop()
        if array.item is Kind.STRING:
            yield from ((f"{where}[{index}]", text) for index, text in enumerate(array.data))
        elif array.item is Kind.ARRAY:
            todo += [(f"{where}[{index}]", item) for index, item in enumerate(array.data)]


def _check_characters(where: str, text: str) -> Iterator[Finding]:
    for level, phrase in deceiving_characters(text):
        yield Finding("characters", f"holds {phrase}", level, (where,))
    if hidden := hidden_text(text):
        yield Finding("characters", f"spells in invisible characters: {quoted(hidden)}", Level.BAD, (where,))


def _check_contents(where: str, text: str) -> Iterator[Finding]:
    if links := sorted({match[0] for match in _LINK.finditer(text)}):
        yield Finding("links", f"links to {listed(links)}", Level.NOTE, (where,))
        if any(map(_LOGIN_IN_LINK.search, links)):
            yield Finding("secret", "a link with a user name and a password in it", Level.WARNING, (where,))
    if match := _UNC.search(text):
        yield Finding("links", f"names a network share: {quoted(match[0])}", Level.NOTE, (where,))
    if match := _LOCAL_PATH.search(text):
        said = f"tells a path on its maker's machine: {quoted(match[0])}"
        yield Finding("path", said, Level.NOTE, (where,))
    if match := _SHELL.search(text):
        said = f"holds what a shell or Python would run: {quoted(match[0])}"
        yield Finding("shell", said, Level.NOTE, (where,))
    for kind, pattern in _SECRETS.items():
        if match := pattern.search(text):
            begin = quoted(match[0][:6])
            yield Finding("secret", f"holds what looks like {kind}: {begin}...", Level.WARNING, (where,))


def _check_sizes(metadata: Metadata) -> Iterator[Finding]:
    for key, value in metadata.items():
        if value.item is Kind.STRING and len(value.data) > _MAX_TEXTS and not key.startswith("tokenizer."):
            text = f"{len(value.data):,} texts; only the first {_MAX_TEXTS:,} were read"
            yield Finding("huge", text, Level.WARNING, (key,))
        elif key == keys.TOKENIZER_TOKENS and value.item is Kind.STRING:
            longest = max(value.data, key=len, default="")
            if len(longest) > _MAX_TOKEN_CHARS:
                text = f"a token of {len(longest):,} characters: {quoted(longest, 40)}"
                yield Finding("huge", text, Level.WARNING, (key,))
