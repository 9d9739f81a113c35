"""Positions of bits in blocks, by the ways in which types pack numbers.

Position 8 * i + j is bit j of byte i. A function returns the positions of the bits of each number, an integer
array (numbers, bits of each), of a field that starts at byte `at`.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Positions = npt.NDArray[np.int64]


def bits_at(byte: Positions, shift: Positions | int, count: int) -> Positions:
    """Return the positions of `count` bits from bit `shift` of each byte on."""
    return (8 * byte + shift)[:, np.newaxis] + np.arange(count)


def bytes_at(first: int, count: int) -> Positions:
    """Return the positions of the bits of `count` bytes in a run."""
    return bits_at(first + np.arange(count), 0, 8)


E = np.arange(256)
"""The numbers of the weights of a block of 256."""

E32 = np.arange(32)
"""Those of a block of 32, and of groups of 8 among 256."""

J8 = np.arange(8)
"""The numbers of sub-blocks of 32."""

J16 = np.arange(16)
"""The numbers of sub-blocks of 16."""


# ---- codes of base types, from byte `at` on


def halves_of_32(at: int, e: Positions = E) -> Positions:
    """Place codes of 4 bits: 16 bytes hold 32, the lower halves first."""
    return bits_at(at + e // 32 * 16 + e % 16, 4 * (e // 16 % 2), 4)


def halves_of_64(at: int) -> Positions:
    """Place codes of 4 bits: 32 bytes hold 64, the lower halves first."""
    return bits_at(at + E // 64 * 32 + E % 32, 4 * (E // 32 % 2), 4)


def pairs_of_128(at: int) -> Positions:
    """Place codes of 2 bits: 32 bytes hold 128, the lowest bits first."""
    return bits_at(at + E // 128 * 32 + E % 32, 2 * (E // 32 % 4), 2)


def single_bits(at: int) -> Positions:
    """Place single bits: bit j of byte i is of weight 32 * j + i."""
    return bits_at(at + E % 32, E // 32, 1)


# ---- codes of row k of four rows, from byte `at` on


def halves_of_4_rows(at: int, k: int, e: Positions = E) -> Positions:
    """Place codes of 4 bits: 64 bytes hold 32 of each row."""
    quarter = 2 * (e // 4 % 2) + e // 16 % 2
    return bits_at(at + 64 * (e // 32) + 16 * quarter + 4 * k + e % 4, 4 * (e // 8 % 2), 4)


def pairs_of_4_rows(at: int, k: int) -> Positions:
    """Place codes of 2 bits: 32 bytes hold 32 of each row."""
    return bits_at(at + 32 * (E // 32) + 16 * (E // 16 % 2) + 4 * k + E % 4, 2 * (E // 4 % 4), 2)


def single_bits_of_4_rows(at: int, k: int, order: tuple[int, int, int]) -> Positions:
    """Place single bits: 16 bytes hold 32 of each row.

    `order` has the weights of e // 4 % 2, e // 8 % 2 and e // 16 % 2 in the number of the bit.
    """
    shift = order[0] * (E // 4 % 2) + order[1] * (E // 8 % 2) + order[2] * (E // 16 % 2)
    return bits_at(at + 16 * (E // 32) + 4 * k + E % 4, shift, 1)


# ---- scales


def in_halves(at: int, j: Positions) -> Positions:
    """Place numbers of 4 bits: byte i holds 2 * i in its lower half, 2 * i + 1 in the upper."""
    return bits_at(at + j // 2, 4 * (j % 2), 4)


def in_pairs(at: int, j: Positions) -> Positions:
    """Place numbers of 2 bits, the lowest bits of a byte first."""
    return bits_at(at + j // 4, 2 * (j % 4), 2)


def one_each(at: int, j: Positions) -> Positions:
    """Place single bits, the lowest of a byte first."""
    return bits_at(at + j // 8, j % 8, 1)


def spread(at: int, number: Positions, size: int, count: int) -> Positions:
    """Place numbers: n is in byte n % size, `count` bits from bit count * (n // size) on."""
    return bits_at(at + number % size, count * (number // size), count)


def half_at(at: int, k: int = 0) -> Positions:
    """Place a float16, the one of row k."""
    return bytes_at(at + 2 * k, 2)


def extra_bits(at: int, k: int) -> Positions:
    """Place the choices of sub-blocks among sets of levels."""
    return bits_at(at + k + 4 * (J16 % 2), J16 // 2, 1)
