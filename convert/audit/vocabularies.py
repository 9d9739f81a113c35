"""How two vocabularies differ, in words, and whether a number then stands for another token.

Converters write the same vocabulary in several ways: tokens that only fill it up have several names, added
tokens are control tokens, user-defined or normal ones, and what follows from the rest may be missing.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, repeat, zip_longest
from typing import Any

from convert.tokenizer.cuttings import DEFAULT, cutting_of
from convert.tokenizer.vocab import TokenType
from gguf_tools.format import keys
from gguf_tools.format.values import Metadata, Value
from gguf_tools.text import quoted

_FILLER = re.compile(r"[<\[]\W?[A-Za-z_]+\d+\W?[>\]]")
"""How converters call tokens that fill a vocabulary up: [PAD151665], <dummy00012>, <|extra_7|>."""

_NONE = ("", TokenType.UNUSED)
"""The token of a number beyond a list."""


def other_tokens(key: str, found: Metadata, wanted: Metadata) -> bool:
    """Whether a number stands for another token; those that only fill a vocabulary up are none."""
    pairs = zip_longest(_tokens_with_kinds(found), _tokens_with_kinds(wanted), fillvalue=_NONE)
    return any(a[0] != b[0] and not _are_fillers(a, b) for a, b in pairs)


def _tokens_with_kinds(vocab: Metadata) -> Iterator[tuple[str, int]]:
    texts = _list_of(str, vocab.get(keys.TOKENIZER_TOKENS))
    known = _list_of(int, vocab.get(keys.TOKENIZER_TOKEN_TYPE))
    return zip(texts, chain(known, repeat(TokenType.NORMAL)), strict=False)


def _list_of(kind: type, value: Value | None) -> tuple[Any, ...]:
    """Return a list whose items are of a kind, and an empty one for another value."""
    data = () if value is None else value.data
    return data if isinstance(data, tuple) and isinstance(next(iter(data), None), kind) else ()


def _are_fillers(*pair: tuple[str, int]) -> bool:
    """Whether neither of two tokens can be in a text: one is unused, the other is, too, or is called so."""
    unused = [kind == TokenType.UNUSED for _, kind in pair]
    return any(unused) and all(
        is_unused or _FILLER.fullmatch(text) for is_unused, (text, _) in zip(unused, pair, strict=True)
    )


def other_kinds(key: str, found: Metadata, wanted: Metadata) -> bool:
    """Whether a word is an ordinary token in one vocabulary alone, or a byte is."""
    pairs = zip(_tokens_with_kinds(found), _tokens_with_kinds(wanted), strict=False)
    return any(a != b and _is_ordinary(text, {a, b}) for (_, a), (text, b) in pairs)


def _is_ordinary(text: str, kinds: set[int]) -> bool:
    is_word = text.strip("\u2581").isalpha()
    return TokenType.BYTE in kinds or (is_word and TokenType.NORMAL in kinds)


def other_pieces(key: str, found: Metadata, wanted: Metadata) -> bool:
    """Whether text is cut otherwise before it becomes tokens; "default" is written where it is not known."""
    if DEFAULT in (found[key].data, wanted[key].data):
        return False
    cuttings = cutting_of(found), cutting_of(wanted)
    return None not in cuttings and cuttings[0] != cuttings[1]


def describe_tokens(found: Value, wanted: Value, metadata: Metadata) -> str:
    """Say how vocabularies differ."""
    if len(found.data) != len(wanted.data):
        more = "more" if len(found.data) > len(wanted.data) else "fewer"
        beginning = next(
            (i for i, (a, b) in enumerate(zip(found.data, wanted.data, strict=False)) if a != b), None
        )
        where = "" if beginning is None else f", and they differ from token {beginning} on"
        return f"{len(found.data):,} tokens, {more} than the base's {len(wanted.data):,}{where}"
    differ = [i for i, (a, b) in enumerate(zip(found.data, wanted.data, strict=True)) if a != b]
    moved = Counter(found.data[i] for i in differ) == Counter(wanted.data[i] for i in differ)
    shown = _first(
        differ, lambda i: f"token {i} is {_token(found.data[i])}, the base's {_token(wanted.data[i])}"
    )
    return f"{len(differ):,} tokens {'are in another order' if moved else 'differ'}: {shown}"


def describe_kinds(found: Value, wanted: Value, metadata: Metadata) -> str:
    """Say of which tokens the kinds differ: added tokens are control tokens, or user-defined ones."""
    if len(found.data) != len(wanted.data):
        return f"{len(found.data):,} kinds of tokens, the base has {len(wanted.data):,}"
    texts = metadata.get(keys.TOKENIZER_TOKENS)
    differ = [i for i, (a, b) in enumerate(zip(found.data, wanted.data, strict=True)) if a != b]

    def told(i: int) -> str:
        name = f" {_token(texts.data[i])}" if texts is not None and i < len(texts.data) else ""
        return f"token {i}{name} is {_kind(found.data[i])}, the base's is {_kind(wanted.data[i])}"

    return f"added tokens: {_first(differ, told)}"


def _first(numbers: Sequence[int], told: Callable[[int], str]) -> str:
    """Tell the first three, and how many more there are."""
    more = [f"{len(numbers) - 3:,} more"] if len(numbers) > 3 else []
    return "; ".join([*map(told, numbers[:3]), *more])


def _token(text: Any) -> str:
    return quoted(str(text), 40)


def _kind(number: int) -> str:
    known = number in TokenType._value2member_map_
    return TokenType(number).name.lower().replace("_", "-") if known else str(number)
