"""Where interleaved types keep each bit of the rows of a group, and where their base types keep it.

ik_llama.cpp lets 4, 8 or 16 rows share a block, so that one load brings the same weights of all. Block for
block the bits are those of the base type, elsewhere. A layout gives the positions of the bits of each number
of a base block (`BITS` of ggml_types.py) and of each field without one: an integer array (numbers, bits of
each), where bit 8 * i + j is bit j of byte i. Of an interleaved block it depends on the row, k = 0 .. R - 1.

The functions that place bits, by the ways in which types pack numbers, return the positions of the bits of
each number of those that start at byte `at`.

Sources: the block structs of ggml-common.h and the functions repack_* of iqk_quantize.cpp, as of
ik_llama.cpp 8337e4c (2026-08-15).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gguf_tools.format.block_layouts import LAYOUTS as BLOCK_LAYOUTS
from gguf_tools.format.ggml_types import GGMLType
from quantize.formats.bits import numbers_of

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


def spread(at: int, number: Positions, size: int, count: int) -> Positions:
    """Place numbers: n is in byte n % size, `count` bits from bit count * (n // size) on."""
    return bits_at(at + number % size, count * (number // size), count)


def half_at(at: int, k: int) -> Positions:
    """Place a float16, the one of row k."""
    return bytes_at(at + 2 * k, 2)


def extra_bits(at: int, k: int) -> Positions:
    """Place the choices of sub-blocks among sets of levels."""
    return bits_at(at + k + 4 * (J16 % 2), J16 // 2, 1)


Layout = Mapping[str, Positions]


@dataclass(frozen=True)
class GroupLayout:
    """How an interleaved type regroups its base type.

    interleaved  row -> layout of its part of an interleaved block
    cell_elems   elements of a row that are regrouped together; 0: those of a block
    signs        (start, stop, step) of the bytes whose upper 7 bits are signs in another code, or None
    """

    interleaved: Callable[[int], Layout]
    cell_elems: int = 0
    signs: tuple[int, int, int] | None = None


def base_layout(base: GGMLType, cell_elems: int) -> Layout:
    """Return the layout of `cell_elems` elements of a base type, a block, or several of its only field."""
    numbers = numbers_of(base)
    told = frozenset[str]().union(*(each.fields for each in numbers.values()))
    n_blocks = cell_elems // base.block_elems
    return {name: each.positions for name, each in numbers.items()} | {
        field.name: bytes_at(field.offset, n_blocks * field.count * field.item_bytes)
        for field in BLOCK_LAYOUTS[base.name].block
        if field.name not in told
    }


# ---- types with blocks of 32


def _q4_0_r8(k: int) -> Layout:
    e = E32
    return {"d": half_at(0, k), "codes": bits_at(16 + 32 * (e % 16 // 4) + 4 * k + e % 4, 4 * (e // 16), 4)}


def _q5_0_r4(k: int) -> Layout:
    e = E32
    shift = 2 * (e // 4 % 2) + e // 16 + 4 * (e // 8 % 2)
    upper = bits_at(8 + 4 * k + e % 4, shift, 1)
    return {"d": half_at(0, k), "codes": np.hstack([halves_of_4_rows(24, k, e), upper])}


def _q6_0_r4(k: int) -> Layout:
    e = E32
    shift = 2 * (e // 4 % 2) + 4 * (e // 8 % 2)
    upper = bits_at(8 + 4 * k + e % 4 + 16 * (e // 16), shift, 2)
    return {"d": half_at(0, k), "codes": np.hstack([halves_of_4_rows(40, k, e), upper])}


def _q8_0_r8(k: int) -> Layout:
    e = E32
    byte = 16 + 32 * (e % 16 // 4) + 4 * k + e % 4 + 128 * (e // 16)
    return {"d": half_at(0, k), "codes": bits_at(byte, 0, 8)}


# ---- k-quants


def _scales_of_4_rows(k: int) -> Layout:
    """Place scales and minimums of 6 bits: bytes 16 .. 31 have the upper bits, 32 .. 63 the lower."""
    number = 4 * J8 + k
    byte, shift = 16 + number % 16, 4 * (number // 16)
    return {
        "scales": np.hstack([bits_at(32 + number, 0, 4), bits_at(byte, shift, 2)]),
        "lows": np.hstack([bits_at(32 + number, 4, 4), bits_at(byte, shift + 2, 2)]),
    }


def _q2_k_r4(k: int) -> Layout:
    return {
        "d": half_at(0, k),
        "dmin": half_at(8, k),
        "scales": bits_at(16 + 4 * J16 + k, 0, 4),
        "lows": bits_at(16 + 4 * J16 + k, 4, 4),
        "codes": pairs_of_4_rows(80, k),
    }


def _q3_k_r4(k: int) -> Layout:
    return {
        "d": half_at(0, k),
        "scales": np.hstack([spread(24, 4 * J16 + k, 32, 4), spread(8, 4 * J16 + k, 16, 2)]),
        "codes": np.hstack([pairs_of_4_rows(184, k), single_bits_of_4_rows(56, k, (1, 2, 4))]),
    }


def _q4_k_r4(k: int) -> Layout:
    halves = {"d": half_at(0, k), "dmin": half_at(8, k)}
    return halves | dict(_scales_of_4_rows(k)) | {"codes": halves_of_4_rows(64, k)}


def _q5_k_r4(k: int) -> Layout:
    halves = {"d": half_at(0, k), "dmin": half_at(8, k)}
    codes = np.hstack([halves_of_4_rows(192, k), single_bits_of_4_rows(64, k, (2, 1, 4))])
    return halves | dict(_scales_of_4_rows(k)) | {"codes": codes}


def _q6_k_r4(k: int) -> Layout:
    shift = 4 * (E // 4 % 2) + 2 * (E // 8 % 2)
    upper = bits_at(72 + 32 * (E // 32) + 16 * (E // 16 % 2) + 4 * k + E % 4, shift, 2)
    return {
        "d": half_at(0, k),
        "scales": bits_at(8 + 4 * J16 + k, 0, 8),
        "codes": np.hstack([halves_of_4_rows(328, k), upper]),
    }


# ---- types on a grid; a number g is of the group of weights g


def _iq2_xxs_r4(k: int) -> Layout:
    g = E32
    word = 8 + 16 * (g // 4) + 4 * k + g % 4
    return {
        "d": half_at(0, k),
        "codes": bits_at(136 + 16 * (g // 4) + 4 * k + g % 4, 0, 8),
        "signs": bits_at(word, 1, 7),
        "scales": bits_at(word, 0, 1),
    }


def _iq3_xxs_r4(k: int) -> Layout:
    g, e = E32, np.arange(64)
    word = 8 + 16 * (g // 4) + 4 * k + g % 4
    return {
        "d": half_at(0, k),
        "codes": bits_at(136 + 32 * (e // 8) + 8 * k + e % 8, 0, 8),
        "signs": bits_at(word, 1, 7),
        "scales": bits_at(word, 0, 1),
    }


def _iq2_xs_r4(k: int) -> Layout:
    g = E32
    byte = 8 + 32 * (g // 4) + 8 * k + 2 * (g % 4)
    return {
        "d": half_at(0, k),
        "codes": bits_at(byte, 0, 9),
        "signs": bits_at(byte, 9, 7),
        "scales": bits_at(264 + 4 * J8 + k, 0, 8),
    }


def _iq2_s_r4(k: int) -> Layout:
    g = E32
    own = 16 * (g // 4) + 4 * k + g % 4
    return {
        "d": half_at(0, k),
        "codes": np.hstack([bits_at(8 + own, 0, 8), bits_at(136 + 4 * (g // 4) + k, 2 * (g % 4), 2)]),
        "signs": bits_at(168 + own, 0, 8),
        "scales": bits_at(296 + 4 * J8 + k, 0, 8),
    }


def _iq3_s_r4(k: int) -> Layout:
    g = np.arange(64)
    lower = bits_at(8 + 32 * (g // 8) + 8 * (g % 4) + 4 * (g // 4 % 2) + k, 0, 8)
    return {
        "d": half_at(0, k),
        "codes": np.hstack([lower, bits_at(264 + 4 * (g // 8) + k, g % 8, 1)]),
        "signs": bits_at(296 + 16 * (E // 32) + 4 * k + E % 4, E // 4 % 8, 1),
        "scales": spread(424, 4 * J8 + k, 16, 4),
    }


# ---- non-linear types


def _iq4_xs_r8(k: int) -> Layout:
    number = 8 * J8 + k
    return {
        "d": half_at(0, k),
        "scales": np.hstack([spread(32, number, 32, 4), spread(16, number, 16, 2)]),
        "codes": bits_at(64 + 128 * (E // 32) + 32 * (E // 8 % 4) + 4 * k + E % 4, 4 * (E // 4 % 2), 4),
    }


def _iq2_k_r4(k: int) -> Layout:
    return {
        "d": half_at(0, k),
        "extra": extra_bits(8, k),
        "scales": spread(16, 4 * J16 + k, 32, 4),
        "codes": pairs_of_4_rows(48, k),
    }


def _iq3_k_r4(k: int) -> Layout:
    return {
        "d": half_at(0, k),
        "extra": extra_bits(8, k),
        "scales": np.hstack([spread(24, 4 * J16 + k, 32, 4), spread(16, 4 * J16 + k, 8, 1)]),
        "codes": np.hstack([pairs_of_4_rows(56, k), single_bits_of_4_rows(312, k, (1, 2, 4))]),
    }


def _iq4_k_r4(k: int) -> Layout:
    return {
        "d": half_at(0, k),
        "extra": extra_bits(8, k),
        "scales": np.hstack([spread(32, 4 * J16 + k, 32, 4), spread(16, 4 * J16 + k, 16, 2)]),
        "codes": halves_of_4_rows(64, k),
    }


def _iq5_k_r4(k: int) -> Layout:
    upper = single_bits_of_4_rows(576, k, (4, 1, 2))
    return dict(_iq4_k_r4(k)) | {"codes": np.hstack([halves_of_4_rows(64, k), upper])}


def _iq4_ks_r4(k: int) -> Layout:
    return {"scales": bits_at(4 * J8 + k, 0, 8), "codes": halves_of_4_rows(32, k)}


def _iq5_ks_r4(k: int) -> Layout:
    upper = single_bits_of_4_rows(544, k, (4, 1, 2))
    return dict(_iq4_ks_r4(k)) | {"codes": np.hstack([halves_of_4_rows(32, k), upper])}


# ---- the table

GROUP_LAYOUTS: Mapping[str, GroupLayout] = {
    "BF16_R16": GroupLayout(lambda k: {"x": bytes_at(4 * k, 4)}, cell_elems=2),
    "Q4_0_R8": GroupLayout(_q4_0_r8),
    "Q5_0_R4": GroupLayout(_q5_0_r4),
    "Q6_0_R4": GroupLayout(_q6_0_r4),
    "Q8_0_R8": GroupLayout(_q8_0_r8),
    "Q2_K_R4": GroupLayout(_q2_k_r4),
    "Q3_K_R4": GroupLayout(_q3_k_r4),
    "Q4_K_R4": GroupLayout(_q4_k_r4),
    "Q5_K_R4": GroupLayout(_q5_k_r4),
    "Q6_K_R4": GroupLayout(_q6_k_r4),
    "IQ2_XXS_R4": GroupLayout(_iq2_xxs_r4, signs=(8, 136, 1)),
    "IQ2_XS_R4": GroupLayout(_iq2_xs_r4, signs=(9, 264, 2)),
    "IQ2_S_R4": GroupLayout(_iq2_s_r4),
    "IQ3_XXS_R4": GroupLayout(_iq3_xxs_r4, signs=(8, 136, 1)),
    "IQ3_S_R4": GroupLayout(_iq3_s_r4),
    "IQ4_NL_R4": GroupLayout(lambda k: {"d": half_at(0, k), "codes": halves_of_4_rows(8, k, E32)}),
    "IQ4_XS_R8": GroupLayout(_iq4_xs_r8),
    "IQ2_K_R4": GroupLayout(_iq2_k_r4),
    "IQ3_K_R4": GroupLayout(_iq3_k_r4),
    "IQ4_K_R4": GroupLayout(_iq4_k_r4),
    "IQ5_K_R4": GroupLayout(_iq5_k_r4),
    "IQ4_KS_R4": GroupLayout(_iq4_ks_r4),
    "IQ5_KS_R4": GroupLayout(_iq5_ks_r4),
}
"""The layouts by the name of the interleaved type."""
