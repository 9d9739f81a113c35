"""Tokens that a text is cut at before all else: those that a user defined, and control tokens if asked for.

llama.cpp takes them one by one, the longest first, and cuts the whole text at each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from convert.tokenizer.vocab import TokenType
from gguf_tools.errors import BadTokenizer
from gguf_tools.format import keys
from gguf_tools.format.values import Metadata, bytes_of


def token_texts(vocab: Metadata) -> list[str]:
    """Return the text of every token; llama.cpp has names of its own for empty ones."""
    tokens = items_of(vocab, keys.TOKENIZER_TOKENS)
    return [text or f"[EMPTY_{number}]" for number, text in enumerate(tokens)]


def matched_texts(texts: Sequence[str], vocab: Metadata, parse_special: bool) -> list[str]:
    """Return the tokens that a text is cut at first, the longest in front.

    parse_special  control tokens are among them
    """
    kinds = items_of(vocab, keys.TOKENIZER_TOKEN_TYPE, TokenType.NORMAL, len(texts))
    wanted = {TokenType.USER_DEFINED, *((TokenType.CONTROL, TokenType.UNKNOWN) if parse_special else ())}
    matched = [text for text, kind in zip(texts, kinds, strict=True) if kind in wanted]
    return sorted(matched, key=lambda text: -len(bytes_of(text)))


def cut_at_matches(text: str, matched: Sequence[str], ids: Mapping[str, int]) -> list[str | int]:
    """Return the text with matched tokens replaced by their ids; no item is empty."""
    parts: list[str | int] = [text] if text else []
    for match in matched:
        if match not in text:
            continue
        cut: list[str | int] = []
        for part in parts:
            if isinstance(part, int):
                cut.append(part)
                continue
            for number, piece in enumerate(part.split(match)):
                if number:
                    cut.append(ids[match])
                if piece:
                    cut.append(piece)
        parts = cut
    return parts


def items_of(vocab: Metadata, key: str, default: Any = None, count: int | None = None) -> tuple[Any, ...]:
    """Return the items of an array, or `count` times `default` where it is missing.

    raises  BadTokenizer for another length than `count`
    """
    value = vocab.get(key)
    if value is None:
        return (default,) * (count or 0)
    if count is not None and len(value.data) != count:
        raise BadTokenizer(f"{key} has {len(value.data)} items for {count} tokens")
    return tuple(value.data)
