"""IQ3_S: 256 weights in 110 bytes, 3.4375 bits each.

    bytes         field
    0 .. 1        d       float16
    2 .. 65       qs      for each group of 4 weights the lower 8 bits of a point's index in the grid IQ3_S
    66 .. 73      qh      bit 8 of the indices: bit k of byte j is that of group 8 * j + k
    74 .. 105     signs   bit i of byte k is set where weight 8 * k + i is negative
    106 .. 109    scales  sc of 4 bits for each sub-block of 32: two in a byte, the lower bits first

The value of a weight, in a sub-block with scale sc, where v is 1, 3, 5 .. 15 by the grid point's level:

    +-d * (1 + 2 * sc) * v

ggml leaves no gap in qs and signs for a sub-block that is all zero: those of later sub-blocks move up, while
qh and scales keep their places. Such a block decodes to something else than was meant; the bytes here are
the same nevertheless.

Encoding fails with BadWeights where ggml aborts: when squared errors are beyond float32, which takes
weights around 1e19 or importances near float32's largest.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from gguf_tools.format.ggml_types import IQ3_S
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
from quantize.simd.floats import ZERO, float_at, to_half_bits
from quantize.simd.kernel import inlinable, kernel
from quantize.simd.lane_memory import FloatTile, IntTile, float_tile, int_tile, tail
from quantize.simd.lanes import LANES, Floats, Mask, any_lane, select, splat
from quantize.simd.octets import EIGHT
from quantize.simd.tiles import (
    first_failure,
    first_not_finite,
    load_blocks,
    load_importances,
    padded_words,
    store_blocks,
)

BLOCK = block_dtype(IQ3_S)
_FUDGE = np.float32(1.033)
_REACH = 9
_SIGNS = 0xFF
_BYTES = BLOCK.itemsize
_WORDS = padded_words(_BYTES)
_HALVES = _BYTES // 2
_PADDED = _HALVES + 1  # whole words
_QS, _QH, _SIGNS_AT, _SCALES = 1, 33, 37, 53  # where fields begin, in halves


@kernel
def _decode(
    data: npt.NDArray[np.uint8], values: npt.NDArray[np.float32], out: npt.NDArray[np.float32]
) -> None:
    for k in range(data.size // _BYTES):
        start = k * _BYTES
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
    scales, scale_codes, empty = float_tile(8), int_tile(8), int_tile(8)
    signs, indices, halves, high = int_tile(4), int_tile(GROUPS), int_tile(_PADDED), int_tile(8)
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
        scales[j], active, failed = _search_sub_block(grid, search, signs, indices)
        any_failed |= failed
        any_empty |= ~active
        empty[j] = select(active, splat(0), 1)
        high[j] = splat(0)
        for k in range(GROUPS):
            high[j] = high[j] | indices[k] >> 8 << k
        for k in range(4):
            low = indices[2 * k] & 0xFF | (indices[2 * k + 1] & 0xFF) << 8
            halves[_QS + 4 * j + k] = low
        for k in range(2):
            halves[_SIGNS_AT + 2 * j + k] = signs[2 * k] | signs[2 * k + 1] << 8
    if any_lane(any_empty):
        _close_gaps(empty, 4, tail(halves, _QS))
        _close_gaps(empty, 2, tail(halves, _SIGNS_AT))
    d, _nothing = code_scales(scales, 8, 15, scale_codes)
    halves[0] = to_half_bits(d * _FUDGE)
    for k in range(4):
        halves[_QH + k] = high[2 * k] | high[2 * k + 1] << 8
    for k in range(2):
        low = scale_codes[4 * k] | scale_codes[4 * k + 1] << 4
        halves[_SCALES + k] = low | scale_codes[4 * k + 2] << 8 | scale_codes[4 * k + 3] << 12
    join_halves(halves, _HALVES, words)
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
def _search_sub_block(
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
    scale, failed = search_candidates(grid, search, _REACH, largest, active)
    any_moved = search.moved[0]
    for k in range(1, GROUPS):
        any_moved |= search.moved[k]
    for k in range(GROUPS):
        search.moved[k] = any_moved
    scale, failed_again = search_again(grid, search, scale)
    scale, failed = finish(grid, search, scale, active, failed | failed_again, _SIGNS, signs, indices)
    return scale, active, failed


FORMAT = block_format(
    IQ3_S,
    _decode,
    _quantize_plain,
    _quantize_weighted,
    tables=lambda: (tables(grids.IQ3_S, EIGHT),),
    decode_tables=lambda: (point_values(grids.IQ3_S),),
)
