"""IQ3_XXS: 256 weights in 98 bytes, 3.0625 bits each.

    bytes       field
    0 .. 1      d      float16
    2 .. 65     qs     for each group of 4 weights the index of a point of the grid IQ3_XXS
    66 .. 97    words  32 bits, little-endian, for each sub-block of 32:
                       bits 7 * k .. 7 * k + 6, k = 0 .. 3   the signs of weights 8 * k .. 8 * k + 6; that of
                                                             weight 8 * k + 7 makes their count even
                       bits 28 .. 31                         sc

The value of a weight, in a sub-block with scale sc, where v is 4, 12, 20, 28, 36, 44, 52 or 62 by the grid
point's level:

    +-d * (0.5 + sc) * 0.5 * v

Encoding fails with BadWeights where ggml aborts: when squared errors are beyond float32, which takes
weights around 1e19 or importances near float32's largest.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from gguf_tools.format.ggml_types import IQ3_XXS
from quantize.formats.base import Rows, block_dtype, block_format
from quantize.formats.iq import grids
from quantize.formats.iq.grid_blocks import ELEMS, SubBlock, code_scales, join_halves, load_sub_block
from quantize.formats.iq.grids import GridTables, tables
from quantize.formats.iq.grids.cached_search_4 import Answers
from quantize.formats.iq.iq3 import (
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
from quantize.simd.floats import HALF, float_at, to_half_bits
from quantize.simd.kernel import inlinable, kernel
from quantize.simd.lane_memory import FloatTile, IntTile, float_tile, int_tile, tail
from quantize.simd.lanes import LANES, Floats, Mask, any_lane, select, shift_right_logical, splat
from quantize.simd.octets import EIGHT
from quantize.simd.tiles import (
    first_failure,
    first_not_finite,
    load_blocks,
    load_importances,
    padded_words,
    store_blocks,
)

BLOCK = block_dtype(IQ3_XXS)
_EMPTY = np.float32(1e-8)  # ggml's GROUP_MAX_EPS_IQ3_XXS
_FUDGE = np.float32(1.0125)
_REACH = 15
_SIGNS = 0x7F
_BYTES = BLOCK.itemsize
_WORDS = padded_words(_BYTES)
_HALVES = _BYTES // 2
_PADDED = _HALVES + 1  # whole words


@kernel
def _decode(
    data: npt.NDArray[np.uint8], values: npt.NDArray[np.float32], out: npt.NDArray[np.float32]
) -> None:
    for k in range(data.size // _BYTES):
        start = k * _BYTES
        d = float_at(data, start)
        for j in range(8):
            at = start + 66 + 4 * j
            word = data[at] | data[at + 1] << 8 | data[at + 2] << 16 | data[at + 3] << 24
            scale = d * (HALF + np.float32(word >> 28)) * HALF
            for n in range(4):
                signs = word >> 7 * n & _SIGNS
                odd = signs ^ signs >> 4
                odd ^= odd >> 2
                signs |= ((odd ^ odd >> 1) & 1) << 7
                group = start + 2 + 8 * j + 2 * n
                first = ELEMS * k + 32 * j + 8 * n
                decode_eight(values, data[group], data[group + 1], signs, scale, out, first)


@kernel
def _quantize_weighted(
    source: Rows, importances: npt.NDArray[np.float32], grid: GridTables, out: npt.NDArray[np.uint8]
) -> int:
    x, weights, sums = float_tile(256), float_tile(256), float_tile(8)
    words = int_tile(_WORDS)
    for first in range(0, out.size // _BYTES, LANES):
        if not load_blocks(source, first, 256, x):
            return first_not_finite(x, 256, first, out.size // _BYTES)
        load_importances(importances, first, 256, weights)
        weigh(x, weights, mean_square(x, np.float32(2)), 32, sums)
        failed = _encode(grid, x, weights, words)
        if any_lane(failed):
            return first_failure(failed, first, out.size // _BYTES)
        store_blocks(words, out, first, _BYTES)
    return -1


@kernel
def _quantize_plain(source: Rows, grid: GridTables, out: npt.NDArray[np.uint8]) -> int:
    x, weights = float_tile(256), float_tile(256)
    words = int_tile(_WORDS)
    for first in range(0, out.size // _BYTES, LANES):
        if not load_blocks(source, first, 256, x):
            return first_not_finite(x, 256, first, out.size // _BYTES)
        weigh_by_square(x, weights)
        failed = _encode(grid, x, weights, words)
        if any_lane(failed):
            return first_failure(failed, first, out.size // _BYTES)
        store_blocks(words, out, first, _BYTES)
    return -1


@inlinable
def _encode(grid: GridTables, x: FloatTile, weights: FloatTile, words: IntTile) -> Mask:
    """Fill `words` with the blocks of a tile; return where that failed."""
    scales, scale_codes = float_tile(8), int_tile(8)
    signs, indices, halves = int_tile(4), int_tile(GROUPS), int_tile(_PADDED)
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
        scales[j], failed = _search_sub_block(grid, search, signs, indices)
        any_failed |= failed
        for k in range(4):
            halves[1 + 4 * j + k] = indices[2 * k] | indices[2 * k + 1] << 8
        packed = signs[0] | signs[1] << 7 | signs[2] << 14 | signs[3] << 21
        halves[33 + 2 * j] = packed & 0xFFFF
        halves[34 + 2 * j] = shift_right_logical(packed, 16)
    d, nothing = code_scales(scales, 8, 15, scale_codes)
    halves[0] = to_half_bits(d * _FUDGE)
    for j in range(8):
        halves[34 + 2 * j] = halves[34 + 2 * j] | scale_codes[j] << 12
    for k in range(1, _HALVES):
        halves[k] = select(nothing, 0, halves[k])
    join_halves(halves, _HALVES, words)
    return any_failed


@inlinable
def _search_sub_block(
    grid: GridTables, search: IQ3Search, signs: IntTile, indices: IntTile
) -> tuple[Floats, Mask]:
    """Return the scale of a sub-block and where there is none; fill its indices, and amend its signs."""
    largest = largest_value(search.sub.x)
    active = ~(largest < _EMPTY)
    for k in range(GROUPS):
        search.moved[k] = splat(0)
    scale, failed = search_candidates(grid, search, _REACH, largest, active)
    scale, failed_again = search_again(grid, search, scale)
    return finish(grid, search, scale, active, failed | failed_again, _SIGNS, signs, indices)


FORMAT = block_format(
    IQ3_XXS,
    _decode,
    _quantize_plain,
    _quantize_weighted,
    tables=lambda: (tables(grids.IQ3_XXS, EIGHT),),
    decode_tables=lambda: (point_values(grids.IQ3_XXS),),
)
