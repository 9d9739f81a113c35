"""IQ3_XXS and IQ3_S: signs apart, and eight levels, four at a time from a grid.

Encoding fails with BadWeights where ggml aborts: when squared errors are beyond float32, which takes weights
around 1e19 or importances near float32's largest.
"""

from __future__ import annotations

import numpy as np

from gguf_tools.format.ggml_types import IQ3_S, IQ3_XXS
from quantize.formats.base import Bytes, Floats32, block_format
from quantize.formats.iq import grids
from quantize.formats.iq.grid_blocks import (
    ELEMS,
    SubBlock,
    code_scales,
    join_halves,
    load_sub_block,
    plain_grid_kernel,
    weighted_grid_kernel,
)
from quantize.formats.iq.grids import GridTables, tables
from quantize.formats.iq.grids.cached_search_4 import Answers
from quantize.formats.iq.iq3_search import (
    GROUPS,
    IQ3Search,
    decode_eight,
    finish,
    largest_value,
    point_values,
    search_again,
    search_candidates,
    weigh_by_square,
)
from quantize.formats.k_quants.super_block import mean_square, weigh
from quantize.simd.floats import HALF, ZERO, float_at, to_half_bits
from quantize.simd.kernel import inlinable, kernel
from quantize.simd.lane_memory import FloatTile, IntTile, float_tile, int_tile, tail
from quantize.simd.lanes import Floats, Mask, any_lane, select, shift_right_logical, splat
from quantize.simd.octets import EIGHT

# ---- IQ3_XXS

_IQ3_XXS_EMPTY = np.float32(1e-8)  # ggml's GROUP_MAX_EPS_IQ3_XXS
_IQ3_XXS_FUDGE = np.float32(1.0125)
_IQ3_XXS_REACH = 15
_IQ3_XXS_SIGNS = 0x7F
_IQ3_XXS_BYTES = IQ3_XXS.block_bytes
_IQ3_XXS_HALVES = _IQ3_XXS_BYTES // 2
_IQ3_XXS_PADDED = _IQ3_XXS_HALVES + 1  # whole words


@kernel
def _decode_iq3_xxs(data: Bytes, values: Floats32, out: Floats32) -> None:
    """Decode IQ3_XXS: 256 weights in 98 bytes, 3.0625 bits each.

        bytes       field
        0 .. 1      d      float16
        2 .. 65     qs     for each group of 4 weights the index of a point of the grid IQ3_XXS
        66 .. 97    words  32 bits, little-endian, for each sub-block of 32:
                           bits 7 * k .. 7 * k + 6, k = 0 .. 3   the signs of weights 8 * k .. 8 * k + 6; that
                                                                 of weight 8 * k + 7 makes their count even
                           bits 28 .. 31                         sc

    The value of a weight, in a sub-block with scale sc, where v is 4, 12, 20, 28, 36, 44, 52 or 62 by the
    grid point's level:

        +-d * (0.5 + sc) * 0.5 * v
    """
    for k in range(data.size // _IQ3_XXS_BYTES):
        start = k * _IQ3_XXS_BYTES
        d = float_at(data, start)
        for j in range(8):
            at = start + 66 + 4 * j
            word = data[at] | data[at + 1] << 8 | data[at + 2] << 16 | data[at + 3] << 24
            scale = d * (HALF + np.float32(word >> 28)) * HALF
            for n in range(4):
                signs = word >> 7 * n & _IQ3_XXS_SIGNS
                odd = signs ^ signs >> 4
                odd ^= odd >> 2
                signs |= ((odd ^ odd >> 1) & 1) << 7
                group = start + 2 + 8 * j + 2 * n
                first = ELEMS * k + 32 * j + 8 * n
                decode_eight(values, data[group], data[group + 1], signs, scale, out, first)


@weighted_grid_kernel(IQ3_XXS)
def _quantize_weighted_iq3_xxs(grid: GridTables, x: FloatTile, weights: FloatTile, words: IntTile) -> Mask:
    sums = float_tile(8)
    weigh(x, weights, mean_square(x, np.float32(2)), 32, sums)
    return _encode_iq3_xxs(grid, x, weights, words)


@plain_grid_kernel(IQ3_XXS)
def _quantize_plain_iq3_xxs(grid: GridTables, x: FloatTile, words: IntTile) -> Mask:
    weights = float_tile(256)
    weigh_by_square(x, weights)
    return _encode_iq3_xxs(grid, x, weights, words)


@inlinable
def _encode_iq3_xxs(grid: GridTables, x: FloatTile, weights: FloatTile, words: IntTile) -> Mask:
    """Fill `words` with the blocks of a tile; return where that failed."""
    scales, scale_codes = float_tile(8), int_tile(8)
    signs, indices, halves = int_tile(4), int_tile(GROUPS), int_tile(_IQ3_XXS_PADDED)
    sub = SubBlock(float_tile(32), float_tile(32), float_tile(32), float_tile(32))
    answers = Answers(
        wanted=int_tile(GROUPS),
        numbers=int_tile(GROUPS),
        known=int_tile(GROUPS),
        codes=int_tile(GROUPS),
        limits=float_tile(GROUPS),
        margins=float_tile(GROUPS),
    )
    search = IQ3Search(sub, answers, int_tile(GROUPS), int_tile(GROUPS))
    any_failed = splat(0) != 0
    for j in range(8):
        load_sub_block(tail(x, 32 * j), tail(weights, 32 * j), 32, True, search.sub, signs)
        scales[j], failed = _search_sub_block_iq3_xxs(grid, search, signs, indices)
        any_failed |= failed
        for k in range(4):
            halves[1 + 4 * j + k] = indices[2 * k] | indices[2 * k + 1] << 8
        packed = signs[0] | signs[1] << 7 | signs[2] << 14 | signs[3] << 21
        halves[33 + 2 * j] = packed & 0xFFFF
        halves[34 + 2 * j] = shift_right_logical(packed, 16)
    d, nothing = code_scales(scales, 8, 15, scale_codes)
    halves[0] = to_half_bits(d * _IQ3_XXS_FUDGE)
    for j in range(8):
        halves[34 + 2 * j] = halves[34 + 2 * j] | scale_codes[j] << 12
    for k in range(1, _IQ3_XXS_HALVES):
        halves[k] = select(nothing, 0, halves[k])
    join_halves(halves, _IQ3_XXS_HALVES, words)
    return any_failed


@inlinable
def _search_sub_block_iq3_xxs(
    grid: GridTables, search: IQ3Search, signs: IntTile, indices: IntTile
) -> tuple[Floats, Mask]:
    """Return the scale of a sub-block and where there is none; fill its indices, and amend its signs."""
    largest = largest_value(search.sub.x)
    active = ~(largest < _IQ3_XXS_EMPTY)
    for k in range(GROUPS):
        search.moved[k] = splat(0)
    scale, failed = search_candidates(grid, search, _IQ3_XXS_REACH, largest, active)
    scale, failed_again = search_again(grid, search, scale)
    return finish(grid, search, scale, active, failed | failed_again, _IQ3_XXS_SIGNS, signs, indices)


# ---- IQ3_S

_IQ3_S_FUDGE = np.float32(1.033)
_IQ3_S_REACH = 9
_IQ3_S_SIGNS = 0xFF
_IQ3_S_BYTES = IQ3_S.block_bytes
_IQ3_S_HALVES = _IQ3_S_BYTES // 2
_IQ3_S_PADDED = _IQ3_S_HALVES + 1  # whole words
_IQ3_S_QS, _IQ3_S_QH, _IQ3_S_SIGNS_AT, _IQ3_S_SCALES = 1, 33, 37, 53  # where fields begin, in halves


@kernel
def _decode_iq3_s(data: Bytes, values: Floats32, out: Floats32) -> None:
    """Decode IQ3_S: 256 weights in 110 bytes, 3.4375 bits each.

        bytes         field
        0 .. 1        d       float16
        2 .. 65       qs      the lower 8 bits of the indices of 64 groups of 4 weights: points of the grid
                              IQ3_S
        66 .. 73      qh      bit 8 of the indices: bit k of byte j is that of group 8 * j + k
        74 .. 105     signs   bit i of byte k is set where weight 8 * k + i is negative
        106 .. 109    scales  sc of 4 bits for each sub-block of 32: two in a byte, the lower bits first

    The value of a weight, in a sub-block with scale sc, where v is 1, 3, 5 .. 15 by the grid point's level:

        +-d * (1 + 2 * sc) * v

    ggml leaves no gap in qs and signs for a sub-block that is all zero: those of later sub-blocks move up,
    while qh and scales keep their places. Such a block decodes to something else than was meant; the bytes
    here are the same nevertheless.
    """
    for k in range(data.size // _IQ3_S_BYTES):
        start = k * _IQ3_S_BYTES
        d = float_at(data, start)
        for j in range(8):
            scale_code = data[start + 106 + j // 2] >> 4 * (j % 2) & 0xF
            scale = d * np.float32(1 + 2 * scale_code)
            high = data[start + 66 + j]
            for n in range(4):
                group = start + 2 + 8 * j + 2 * n
                first = data[group] | (high >> 2 * n & 1) << 8
                second = data[group + 1] | (high >> 2 * n + 1 & 1) << 8
                signs = data[start + 74 + 4 * j + n]
                decode_eight(values, first, second, signs, scale, out, ELEMS * k + 32 * j + 8 * n)


@weighted_grid_kernel(IQ3_S)
def _quantize_weighted_iq3_s(grid: GridTables, x: FloatTile, weights: FloatTile, words: IntTile) -> Mask:
    sums = float_tile(8)
    weigh(x, weights, mean_square(x, np.float32(2)), 32, sums)
    return _encode_iq3_s(grid, x, weights, words)


@plain_grid_kernel(IQ3_S)
def _quantize_plain_iq3_s(grid: GridTables, x: FloatTile, words: IntTile) -> Mask:
    weights = float_tile(256)
    weigh_by_square(x, weights)
    return _encode_iq3_s(grid, x, weights, words)


@inlinable
def _encode_iq3_s(grid: GridTables, x: FloatTile, weights: FloatTile, words: IntTile) -> Mask:
    """Fill `words` with the blocks of a tile; return where that failed."""
    scales, scale_codes, empty = float_tile(8), int_tile(8), int_tile(8)
    signs, indices, halves, high = int_tile(4), int_tile(GROUPS), int_tile(_IQ3_S_PADDED), int_tile(8)
    sub = SubBlock(float_tile(32), float_tile(32), float_tile(32), float_tile(32))
    answers = Answers(
        wanted=int_tile(GROUPS),
        numbers=int_tile(GROUPS),
        known=int_tile(GROUPS),
        codes=int_tile(GROUPS),
        limits=float_tile(GROUPS),
        margins=float_tile(GROUPS),
    )
    search = IQ3Search(sub, answers, int_tile(GROUPS), int_tile(GROUPS))
    any_failed = splat(0) != 0
    any_empty = any_failed
    for j in range(8):
        load_sub_block(tail(x, 32 * j), tail(weights, 32 * j), 32, False, search.sub, signs)
        scales[j], active, failed = _search_sub_block_iq3_s(grid, search, signs, indices)
        any_failed |= failed
        any_empty |= ~active
        empty[j] = select(active, splat(0), 1)
        high[j] = splat(0)
        for k in range(GROUPS):
            high[j] = high[j] | indices[k] >> 8 << k
        for k in range(4):
            low = indices[2 * k] & 0xFF | (indices[2 * k + 1] & 0xFF) << 8
            halves[_IQ3_S_QS + 4 * j + k] = low
        for k in range(2):
            halves[_IQ3_S_SIGNS_AT + 2 * j + k] = signs[2 * k] | signs[2 * k + 1] << 8
    if any_lane(any_empty):
        _close_gaps(empty, 4, tail(halves, _IQ3_S_QS))
        _close_gaps(empty, 2, tail(halves, _IQ3_S_SIGNS_AT))
    d, _nothing = code_scales(scales, 8, 15, scale_codes)
    halves[0] = to_half_bits(d * _IQ3_S_FUDGE)
    for k in range(4):
        halves[_IQ3_S_QH + k] = high[2 * k] | high[2 * k + 1] << 8
    for k in range(2):
        low = scale_codes[4 * k] | scale_codes[4 * k + 1] << 4
        halves[_IQ3_S_SCALES + k] = low | scale_codes[4 * k + 2] << 8 | scale_codes[4 * k + 3] << 12
    join_halves(halves, _IQ3_S_HALVES, words)
    return any_failed


@inlinable
def _close_gaps(empty: IntTile, size: int, halves: IntTile) -> None:
    """Move up the halves, `size` for each sub-block, that follow those of an empty sub-block."""
    for step in range(8):
        gap = empty[7 - step] != 0
        for k in range(size * (7 - step), size * 7):
            halves[k] = select(gap, halves[k + size], halves[k])
        for k in range(size * 7, size * 8):
            halves[k] = select(gap, 0, halves[k])


@inlinable
def _search_sub_block_iq3_s(
    grid: GridTables, search: IQ3Search, signs: IntTile, indices: IntTile
) -> tuple[Floats, Mask, Mask]:
    """Return the scale of a sub-block, where it is not empty, and where it has no scale.

    Fills its indices, and amends its signs. Codes are searched again in all groups if one was moved, or if
    no candidate was any good.
    """
    largest = largest_value(search.sub.x)
    active = largest != ZERO
    for k in range(GROUPS):
        search.moved[k] = splat(1)
    scale, failed = search_candidates(grid, search, _IQ3_S_REACH, largest, active)
    any_moved = search.moved[0]
    for k in range(1, GROUPS):
        any_moved |= search.moved[k]
    for k in range(GROUPS):
        search.moved[k] = any_moved
    scale, failed_again = search_again(grid, search, scale)
    scale, failed = finish(grid, search, scale, active, failed | failed_again, _IQ3_S_SIGNS, signs, indices)
    return scale, active, failed


FORMATS = (
    block_format(
        IQ3_XXS,
        _decode_iq3_xxs,
        _quantize_plain_iq3_xxs,
        _quantize_weighted_iq3_xxs,
        tables=lambda: (tables(grids.IQ3_XXS, EIGHT),),
        decode_tables=lambda: (point_values(grids.IQ3_XXS),),
    ),
    block_format(
        IQ3_S,
        _decode_iq3_s,
        _quantize_plain_iq3_s,
        _quantize_weighted_iq3_s,
        tables=lambda: (tables(grids.IQ3_S, EIGHT),),
        decode_tables=lambda: (point_values(grids.IQ3_S),),
    ),
)
