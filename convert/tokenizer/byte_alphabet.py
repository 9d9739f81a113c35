"""The alphabet of byte-level BPE: one printable character for every byte, as GPT-2 has it."""

from __future__ import annotations


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
