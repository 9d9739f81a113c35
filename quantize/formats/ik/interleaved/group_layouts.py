"""Where interleaved types keep each bit of the rows of a group, and where their base types keep it.

ik_llama.cpp lets 4, 8 or 16 rows share a block, so that one load brings the same weights of all. Block for
block the bits are those of the base type, elsewhere. A layout gives the positions of the bits of each field
of a base block (scales, codes and so on): an integer array (numbers, bits of each), where bit 8 * i + j is
bit j of byte i. Of an interleaved block the layout depends on the row, k = 0 .. R - 1.

The functions that place bits, by the ways in which types pack numbers, return the positions of the bits of
each number of a field that starts at byte `at`.

Sources: the block structs of ggml-common.h and the functions repack_* of iqk_quantize.cpp, as of
ik_llama.cpp 8337e4c (2026-08-15).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from gguf_tools.format.block_layouts import LAYOUTS as BLOCK_LAYOUTS

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


def _halves_of_128(at: int) -> Positions:
    return bits_at(at + E // 128 * 64 + E % 64, 4 * (E // 64 % 2), 4)


def _pairs_of_q6_0(at: int) -> Positions:
    return bits_at(at + E32 % 8, 4 * (E32 // 8 % 2) + 2 * (E32 // 16), 2)


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


Layout = Mapping[str, Positions]


@dataclass(frozen=True)
class GroupLayout:
    """How an interleaved type regroups its base type.

    base         layout of a base block
    interleaved  row -> layout of its part of an interleaved block
    cell_elems   elements of a row that are regrouped together; 0: those of a block
    signs        (start, stop, step) of the bytes whose upper 7 bits are signs in another code, or None
    """

    base: Layout
    interleaved: Callable[[int], Layout]
    cell_elems: int = 0
    signs: tuple[int, int, int] | None = None


# ---- types with blocks of 32


def _q4_0_r8(k: int) -> Layout:
    e = E32
    return {"d": half_at(0, k), "qs": bits_at(16 + 32 * (e % 16 // 4) + 4 * k + e % 4, 4 * (e // 16), 4)}


def _q5_0_r4(k: int) -> Layout:
    e = E32
    shift = 2 * (e // 4 % 2) + e // 16 + 4 * (e // 8 % 2)
    return {"d": half_at(0, k), "qh": bits_at(8 + 4 * k + e % 4, shift, 1), "qs": halves_of_4_rows(24, k, e)}


def _q6_0_r4(k: int) -> Layout:
    e = E32
    shift = 2 * (e // 4 % 2) + 4 * (e // 8 % 2)
    return {
        "d": half_at(0, k),
        "qh": bits_at(8 + 4 * k + e % 4 + 16 * (e // 16), shift, 2),
        "qs": halves_of_4_rows(40, k, e),
    }


def _q8_0_r8(k: int) -> Layout:
    e = E32
    byte = 16 + 32 * (e % 16 // 4) + 4 * k + e % 4 + 128 * (e // 16)
    return {"d": half_at(0, k), "qs": bits_at(byte, 0, 8)}


def _iq4_nl_r4(k: int) -> Layout:
    return {"d": half_at(0, k), "qs": halves_of_4_rows(8, k, E32)}


# ---- k-quants


def _packed_scales(at: int) -> Layout:
    """Scales and minima of 6 bits, as Q4_K and Q5_K have them."""
    low, high = J8[:4], J8[4:]
    scales = np.concatenate([bits_at(at + low, 0, 4), bits_at(at + 4 + high, 0, 4)])
    minima = np.concatenate([bits_at(at + 4 + low, 0, 4), bits_at(at + 4 + high, 4, 4)])
    upper_scales = np.concatenate([bits_at(at + low, 4, 2), bits_at(at + high - 4, 6, 2)])
    upper_minima = np.concatenate([bits_at(at + 4 + low, 4, 2), bits_at(at + high, 6, 2)])
    return {"sc": scales, "m": minima, "sc_h": upper_scales, "m_h": upper_minima}


def _scales_of_q3_k(at: int) -> Layout:
    lower = bits_at(at + J16 % 8, 4 * (J16 // 8), 4)
    return {"sc": lower, "sc_h": bits_at(at + 8 + J16 % 4, 2 * (J16 // 4), 2)}


def _scales_of_4_rows(k: int) -> Layout:
    """Of the same scales and minima: bytes 16 .. 31 have the upper bits, 32 .. 63 the lower."""
    number = 4 * J8 + k
    return {
        "sc": bits_at(32 + number, 0, 4),
        "m": bits_at(32 + number, 4, 4),
        "sc_h": bits_at(16 + number % 16, 4 * (number // 16), 2),
        "m_h": bits_at(16 + number % 16, 4 * (number // 16) + 2, 2),
    }


def _q2_k_r4(k: int) -> Layout:
    return {
        "d": half_at(0, k),
        "dmin": half_at(8, k),
        "scales": bits_at(16 + 4 * J16 + k, 0, 8),
        "qs": pairs_of_4_rows(80, k),
    }


def _q3_k_r4(k: int) -> Layout:
    return {
        "d": half_at(0, k),
        "sc_h": spread(8, 4 * J16 + k, 16, 2),
        "sc": spread(24, 4 * J16 + k, 32, 4),
        "hmask": single_bits_of_4_rows(56, k, (1, 2, 4)),
        "qs": pairs_of_4_rows(184, k),
    }


def _q4_k_r4(k: int) -> Layout:
    halves = {"d": half_at(0, k), "dmin": half_at(8, k)}
    return halves | dict(_scales_of_4_rows(k)) | {"qs": halves_of_4_rows(64, k)}


def _q5_k_r4(k: int) -> Layout:
    halves = {"d": half_at(0, k), "dmin": half_at(8, k)}
    codes = {"qh": single_bits_of_4_rows(64, k, (2, 1, 4)), "qs": halves_of_4_rows(192, k)}
    return halves | dict(_scales_of_4_rows(k)) | codes


def _q6_k_r4(k: int) -> Layout:
    shift = 4 * (E // 4 % 2) + 2 * (E // 8 % 2)
    return {
        "d": half_at(0, k),
        "scales": bits_at(8 + 4 * J16 + k, 0, 8),
        "qh": bits_at(72 + 32 * (E // 32) + 16 * (E // 16 % 2) + 4 * k + E % 4, shift, 2),
        "ql": halves_of_4_rows(328, k),
    }


# ---- types on a grid; a number g is of the group of weights g


def _iq2_xxs_r4(k: int) -> Layout:
    g = E32
    word = 8 + 16 * (g // 4) + 4 * k + g % 4
    return {
        "d": half_at(0, k),
        "qs": bits_at(136 + 16 * (g // 4) + 4 * k + g % 4, 0, 8),
        "signs": bits_at(word, 1, 7),
        "sc": bits_at(word, 0, 1),
    }


def _iq3_xxs_r4(k: int) -> Layout:
    g, e = E32, np.arange(64)
    word = 8 + 16 * (g // 4) + 4 * k + g % 4
    return {
        "d": half_at(0, k),
        "qs": bits_at(136 + 32 * (e // 8) + 8 * k + e % 8, 0, 8),
        "signs": bits_at(word, 1, 7),
        "sc": bits_at(word, 0, 1),
    }


def _words(at: int, step: int = 4) -> Layout:
    """32 bits every `step` bytes: four signs of 7 bits, a scale of 4."""
    word, place = at + step * (E32 // 4), E32 % 4
    return {"signs": bits_at(word, 7 * place, 7), "sc": bits_at(word, 28 + place, 1)}


def _codes_and_words(at: int) -> Layout:
    """Four codes, then the 32 bits that belong to them."""
    return {"qs": bits_at(at + 8 * (E32 // 4) + E32 % 4, 0, 8)} | dict(_words(at + 4, 8))


def _codes_of_16_bits(at: int) -> Positions:
    return bits_at(at + 2 * E32, 0, 16)


def _iq2_xs_r4(k: int) -> Layout:
    g = E32
    return {
        "d": half_at(0, k),
        "qs": bits_at(8 + 32 * (g // 4) + 8 * k + 2 * (g % 4), 0, 16),
        "scales": bits_at(264 + 4 * J8 + k, 0, 8),
    }


def _iq2_s_r4(k: int) -> Layout:
    g = E32
    own = 16 * (g // 4) + 4 * k + g % 4
    return {
        "d": half_at(0, k),
        "qs": bits_at(8 + own, 0, 8),
        "qh": bits_at(136 + 4 * J8 + k, 0, 8),
        "signs": bits_at(168 + own, 0, 8),
        "scales": bits_at(296 + 4 * J8 + k, 0, 8),
    }


def _iq3_s_r4(k: int) -> Layout:
    g = np.arange(64)
    return {
        "d": half_at(0, k),
        "qs": bits_at(8 + 32 * (g // 8) + 8 * (g % 4) + 4 * (g // 4 % 2) + k, 0, 8),
        "qh": bits_at(264 + 4 * J8 + k, 0, 8),
        "signs": bits_at(296 + 16 * (E // 32) + 4 * k + E % 4, E // 4 % 8, 1),
        "scales": spread(424, 4 * J8 + k, 16, 4),
    }


# ---- non-linear types


def _iq4_xs_r8(k: int) -> Layout:
    number = 8 * J8 + k
    return {
        "d": half_at(0, k),
        "scales_h": spread(16, number, 16, 2),
        "scales_l": spread(32, number, 32, 4),
        "qs": bits_at(64 + 128 * (E // 32) + 32 * (E // 8 % 4) + 4 * k + E % 4, 4 * (E // 4 % 2), 4),
    }


def _iq2_k_r4(k: int) -> Layout:
    return {
        "d": half_at(0, k),
        "extra": extra_bits(8, k),
        "scales": spread(16, 4 * J16 + k, 32, 4),
        "qs": pairs_of_4_rows(48, k),
    }


def _iq3_k_r4(k: int) -> Layout:
    return {
        "d": half_at(0, k),
        "extra": extra_bits(8, k),
        "scales_h": spread(16, 4 * J16 + k, 8, 1),
        "scales_l": spread(24, 4 * J16 + k, 32, 4),
        "qs": pairs_of_4_rows(56, k),
        "qh": single_bits_of_4_rows(312, k, (1, 2, 4)),
    }


def _iq4_k_r4(k: int) -> Layout:
    return {
        "d": half_at(0, k),
        "extra": extra_bits(8, k),
        "scales_h": spread(16, 4 * J16 + k, 16, 2),
        "scales_l": spread(32, 4 * J16 + k, 32, 4),
        "qs": halves_of_4_rows(64, k),
    }


def _iq5_k_r4(k: int) -> Layout:
    return dict(_iq4_k_r4(k)) | {"qh": single_bits_of_4_rows(576, k, (4, 1, 2))}


def _iq4_ks_r4(k: int) -> Layout:
    return {"scales": bits_at(4 * J8 + k, 0, 8), "qs": halves_of_4_rows(32, k)}


def _iq5_ks_r4(k: int) -> Layout:
    return dict(_iq4_ks_r4(k)) | {"qh": single_bits_of_4_rows(544, k, (4, 1, 2))}


# ---- the table

Place = Callable[[int], Positions | Layout]
"""Places what a field of a base block holds, from the byte on at which the field starts."""


def _n_bytes(count: int) -> Place:
    return partial(bytes_at, count=count)


def _base(name: str, **places: Place) -> Layout:
    """Lay out the blocks of a base type, whose fields start where block_layouts.py says.

    A place that gives a layout has several numbers in one field.
    """
    positions: dict[str, Positions] = {}
    for field in BLOCK_LAYOUTS[name].block:
        placed = places[field.name](field.offset)
        positions |= placed if isinstance(placed, Mapping) else {field.name: placed}
    return positions


_HALVES = partial(halves_of_32, e=E32)
_EXTRA = partial(one_each, j=J16)
_SCALES_OF_IQ45_K = {"scales_h": partial(in_pairs, j=J16), "scales_l": partial(in_halves, j=J16)}

GROUP_LAYOUTS: Mapping[str, GroupLayout] = {
    "BF16_R16": GroupLayout({"pair": bytes_at(0, 4)}, lambda k: {"pair": bytes_at(4 * k, 4)}, cell_elems=2),
    "Q4_0_R8": GroupLayout(_base("Q4_0", d=half_at, qs=_HALVES), _q4_0_r8),
    "Q5_0_R4": GroupLayout(_base("Q5_0", d=half_at, qh=partial(one_each, j=E32), qs=_HALVES), _q5_0_r4),
    "Q6_0_R4": GroupLayout(_base("Q6_0", d=half_at, qh=_pairs_of_q6_0, qs=_HALVES), _q6_0_r4),
    "Q8_0_R8": GroupLayout(_base("Q8_0", d=half_at, qs=_n_bytes(32)), _q8_0_r8),
    "Q2_K_R4": GroupLayout(
        _base("Q2_K", scales=_n_bytes(16), qs=pairs_of_128, d=half_at, dmin=half_at), _q2_k_r4
    ),
    "Q3_K_R4": GroupLayout(
        _base("Q3_K", hmask=single_bits, qs=pairs_of_128, scales=_scales_of_q3_k, d=half_at), _q3_k_r4
    ),
    "Q4_K_R4": GroupLayout(
        _base("Q4_K", d=half_at, dmin=half_at, scales=_packed_scales, qs=halves_of_64), _q4_k_r4
    ),
    "Q5_K_R4": GroupLayout(
        _base("Q5_K", d=half_at, dmin=half_at, scales=_packed_scales, qh=single_bits, qs=halves_of_64),
        _q5_k_r4,
    ),
    "Q6_K_R4": GroupLayout(
        _base("Q6_K", ql=_halves_of_128, qh=pairs_of_128, scales=_n_bytes(16), d=half_at), _q6_k_r4
    ),
    "IQ2_XXS_R4": GroupLayout(
        _base("IQ2_XXS", d=half_at, qs=_codes_and_words), _iq2_xxs_r4, signs=(8, 136, 1)
    ),
    "IQ2_XS_R4": GroupLayout(
        _base("IQ2_XS", d=half_at, qs=_codes_of_16_bits, scales=_n_bytes(8)), _iq2_xs_r4, signs=(9, 264, 2)
    ),
    "IQ2_S_R4": GroupLayout(
        _base("IQ2_S", d=half_at, qs=_n_bytes(32), signs=_n_bytes(32), qh=_n_bytes(8), scales=_n_bytes(8)),
        _iq2_s_r4,
    ),
    "IQ3_XXS_R4": GroupLayout(
        _base("IQ3_XXS", d=half_at, qs=_n_bytes(64), words=_words), _iq3_xxs_r4, signs=(8, 136, 1)
    ),
    "IQ3_S_R4": GroupLayout(
        _base(
            "IQ3_S",
            d=half_at,
            qs=_n_bytes(64),
            qh=_n_bytes(8),
            signs=partial(one_each, j=E),
            scales=partial(in_halves, j=J8),
        ),
        _iq3_s_r4,
    ),
    "IQ4_NL_R4": GroupLayout(_base("IQ4_NL", d=half_at, qs=_HALVES), _iq4_nl_r4),
    "IQ4_XS_R8": GroupLayout(
        _base(
            "IQ4_XS",
            d=half_at,
            scales_h=partial(in_pairs, j=J8),
            scales_l=partial(in_halves, j=J8),
            qs=halves_of_32,
        ),
        _iq4_xs_r8,
    ),
    "IQ2_K_R4": GroupLayout(
        _base("IQ2_K", d=half_at, extra=_EXTRA, scales=partial(in_halves, j=J16), qs=pairs_of_128), _iq2_k_r4
    ),
    "IQ3_K_R4": GroupLayout(
        _base(
            "IQ3_K",
            d=half_at,
            extra=_EXTRA,
            scales_h=partial(one_each, j=J16),
            scales_l=partial(in_halves, j=J16),
            qs=pairs_of_128,
            qh=single_bits,
        ),
        _iq3_k_r4,
    ),
    "IQ4_K_R4": GroupLayout(
        _base("IQ4_K", d=half_at, extra=_EXTRA, **_SCALES_OF_IQ45_K, qs=halves_of_32), _iq4_k_r4
    ),
    "IQ5_K_R4": GroupLayout(
        _base("IQ5_K", d=half_at, extra=_EXTRA, **_SCALES_OF_IQ45_K, qs=halves_of_64, qh=single_bits),
        _iq5_k_r4,
    ),
    "IQ4_KS_R4": GroupLayout(_base("IQ4_KS", scales=_n_bytes(8), qs=halves_of_32), _iq4_ks_r4),
    "IQ5_KS_R4": GroupLayout(
        _base("IQ5_KS", scales=_n_bytes(8), qs=halves_of_64, qh=single_bits), _iq5_ks_r4
    ),
}
"""The layouts by the name of the interleaved type."""
