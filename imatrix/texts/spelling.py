"""Spelling of tokens: the bytes of each token of a vocabulary, and the text of tokens in a row."""

from __future__ import annotations

import codecs
import re
from collections.abc import Mapping, Sequence
from functools import cache

from gguf_tools.format import keys
from gguf_tools.format.values import Metadata

_BYTE_LEVEL = "gpt2"
"""Value of tokenizer.ggml.model for vocabularies that spell each byte as a printable character."""

_SPACE = "\u2581"
"""Character that stands for a space in SentencePiece vocabularies."""

_BYTE_PIECE = re.compile(r"<0x([0-9A-F]{2})>")


def spelled(vocab: Metadata) -> tuple[bytes, ...]:
    """Return the bytes that each token of a vocabulary stands for, from the keys tokenizer.*."""
    tokens, model = vocab.get(keys.TOKENIZER_TOKENS), vocab.get(keys.TOKENIZER_MODEL)
    if tokens is None:
        return ()
    spell = _byte_level if model is not None and model.data == _BYTE_LEVEL else _piece
    return tuple(map(spell, tokens.data))


def texts(tokens: Sequence[bytes]) -> list[str]:
    """Return the text of each of several tokens in a row; a split character belongs to its last token.

    >>> texts([b"na", b"\\xc3", b"\\xafve"])
    ['na', '', 'ïve']
    """
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    last = len(tokens) - 1
    return [decoder.decode(token, final=number == last) for number, token in enumerate(tokens)]


def _byte_level(token: str) -> bytes:
    table = _byte_of_character()
    if all(character in table for character in token):
        return bytes(table[character] for character in token)
    return token.encode()  # a control token, which stands for itself


def _piece(token: str) -> bytes:
    byte = _BYTE_PIECE.fullmatch(token)
    return bytes([int(byte[1], 16)]) if byte else token.replace(_SPACE, " ").encode()


@cache
def _byte_of_character() -> Mapping[str, int]:
    """Map each character of a byte-level vocabulary to its byte.

    Printable characters of Latin-1 stand for themselves. The other bytes have the characters from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + number): byte for number, byte in enumerate(others)
    }
