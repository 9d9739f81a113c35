"""A vocabulary as a GGUF file stores it, with a text, a type and perhaps a score per token id."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass, replace
from enum import IntEnum
from pathlib import Path
from typing import Any

from gguf_tools.errors import BadTokenizer
from gguf_tools.text import quoted, shown

MAX_VOCAB = 1 << 19
"""Maximum number of rows of an embedding, twice the largest published vocabulary. Every row gets a token."""


class TokenType(IntEnum):
    """tokenizer.ggml.token_type, numbered as in the file."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3  # matched only where special tokens are parsed; prints as nothing
    USER_DEFINED = 4  # matched in any text, before the text is cut into words
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True)
class Vocab:
    """Tokens in the order of their ids.

    merges  byte-level BPE: pairs "left right", best first; empty for SentencePiece
    scores  SentencePiece: log probabilities; None for byte-level BPE
    notes   what the reader had to decide, one line each
    """

    tokens: tuple[str, ...]
    types: tuple[TokenType, ...]
    merges: tuple[str, ...] = ()
    scores: tuple[float, ...] | None = None
    notes: tuple[str, ...] = ()

    def with_control(self, texts: Container[str]) -> Vocab:
        """Return the vocabulary with these tokens as control tokens."""
        types = (
            TokenType.CONTROL if token in texts else kind
            for token, kind in zip(self.tokens, self.types, strict=True)
        )
        return replace(self, types=tuple(types))


def looks_special(text: str) -> bool:
    """True for an added token that models use as a control token though their files don't say `special`.

    The list is that of does_token_look_special in llama.cpp's converter: DeepSeek marks <｜User｜>,
    <｜fim▁hole｜> and others as ordinary, but they must never be matched in a user's text.
    """
    return (
        text in ("<pad>", "<mask>", "<2mass>", "[@BOS@]")
        or (text.startswith("<|") and text.endswith("|>"))
        or (text.startswith("<｜") and text.endswith("｜>"))
        or (text.startswith("<unused") and text.endswith(">"))
    )


def added_tokens_of(
    path: Path, tokenizer_config: Mapping[str, Any]
) -> list[tuple[int, str, Mapping[str, Any]]]:
    """Return (id, text, properties) of the tokens that a tokenizer_config.json adds, in the order of ids.

    raises  BadTokenizer when the list has another form than transformers writes
    """
    entries = tokenizer_config.get("added_tokens_decoder") or {}
    try:
        return sorted((int(token_id), "" + entry["content"], entry) for token_id, entry in entries.items())
    except (AttributeError, KeyError, TypeError, ValueError) as cause:
        reason = shown(repr(cause))
        raise BadTokenizer(
            f"{path}: added_tokens_decoder can't be read ({reason}), expected id -> {{content, ...}}"
        ) from cause


def pad_text(token_id: int) -> str:
    """Return the text of a row of the embedding that no token uses."""
    return f"[PAD{token_id}]"


def check_fits(path: Path, text: str, token_id: int, vocab_size: int) -> None:
    """Raise BadTokenizer unless the embedding, of `vocab_size` rows, has one for the token."""
    if not 0 <= token_id < vocab_size:
        raise BadTokenizer(
            f"{path}: token {quoted(text)} has id {token_id}, but config.json says vocab_size {vocab_size}: "
            "the tokenizer belongs to another model, or vocab_size was not raised when tokens were added"
        )


# ---- the alphabet of byte-level BPE: one printable character for every byte, as GPT-2 has it


def _alphabet() -> str:
    """Return the character of each byte: its own in Latin-1 where that prints, else one from U+0100 on."""
    own = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return "".join(chr(byte if byte in own else next(others)) for byte in range(256))


ALPHABET = _alphabet()
"""Character of each byte, 256 of them; the space becomes Ġ."""


def spelled(data: bytes) -> str:
    """Return bytes as the characters that stand for them."""
    return "".join(ALPHABET[byte] for byte in data)
