"""IQ1_S: 256 weights in 50 bytes, 1.5625 bits each.

    bytes       field
    0 .. 1      d    float16
    2 .. 33     qs   the lower 8 bits of the indices of 32 groups of 8 weights: points of the grid IQ1
    34 .. 49    qh   16 bits for each sub-block of 32:
                     bits 0 .. 11   the upper 3 bits of its four indices
                     bits 12 .. 14  its scale sc
                     bit 15         its shift: 1/8 if clear, -1/8 if set

The value of weight i, where v is -1, 0 or 1 by the grid point:

    d * (2 * sc + 1) * (v + shift)

Encoding fails with BadWeights where ggml aborts: when squared errors are beyond float32. Blocks that hold a
value twice depend on ggml's C library; see `iq1`.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from gguf_tools.format.ggml_types import IQ1_S
from quantize.formats.base import Rows, block_dtype, block_format
from quantize.formats.iq.grid_blocks import ELEMS, code_scales, join_halves
from quantize.formats.iq.iq1 import (
    GROUP,
    MINUS_HIGH,
    MINUS_LOW,
    NO_CUT,
    PLUS_HIGH,
    PLUS_LOW,
    PLUS_MIDDLE,
    WORST,
    Groups,
    PointTables,
    code_groups,
    codes_of_cuts,
    decode_group,
    largest_magnitude,
    point_tables,
    point_values,
)
from quantize.formats.k_quants.super_block import mean_square, weigh
from quantize.simd.floats import ZERO, float_at, to_half_bits
from quantize.simd.kernel import inlinable, kernel
from quantize.simd.lane_memory import FloatTile, IntTile, float_tile, gather, int_tile, tail
from quantize.simd.lanes import LANES, Floats, Ints, Mask, any_lane, select, splat
from quantize.simd.sorting import sort_32
from quantize.simd.tiles import (
    first_failure,
    first_not_finite,
    load_blocks,
    load_importances,
    padded_words,
    store_blocks,
)

BLOCK = block_dtype(IQ1_S)
_BYTES = BLOCK.itemsize
_WORDS = padded_words(_BYTES)
_HALVES = _BYTES // 2
_PADDED_HALVES = _HALVES + 1
_SIZE = 32
_PLACES = _SIZE + 1
_EMPTY = np.float32(1e-12)
_FUDGE = np.float32(1.125)


@kernel
def _decode(
    data: npt.NDArray[np.uint8], values: npt.NDArray[np.float32], rows: npt.NDArray[np.float32]
) -> None:
    for block in range(rows.size // ELEMS):
        offset = block * _BYTES
        d = float_at(data, offset)
        for j in range(ELEMS // _SIZE):
            low, high = offset + 2 + 4 * j, offset + 34 + 2 * j
            word = np.int32(data[high]) | np.int32(data[high + 1]) << 8
            scale = d * np.float32(2 * (word >> 12 & 7) + 1)
            for k in range(4):
                index = np.int32(data[low + k]) | (word >> 3 * k & 7) << 8
                start = ELEMS * block + _SIZE * j + GROUP * k
                decode_group(values, index, word & 0x8000, scale, rows, start)


@kernel
def _quantize(
    source: Rows, importances: npt.NDArray[np.float32], grid: PointTables, out: npt.NDArray[np.uint8]
) -> int:
    x, weights, sums = float_tile(256), float_tile(256), float_tile(8)
    scales, scale_codes, minus = float_tile(8), int_tile(8), int_tile(8)
    points, indices = int_tile(4), int_tile(4)
    halves, words = int_tile(_PADDED_HALVES), int_tile(_WORDS)
    for first in range(0, out.size // _BYTES, LANES):
        if not load_blocks(source, first, 256, x):
            return first_not_finite(x, 256, first, out.size // _BYTES)
        load_importances(importances, first, 256, weights)
        weigh(x, weights, mean_square(x, np.float32(2)), _SIZE, sums)
        for j in range(8):
            start = _SIZE * j
            scales[j], minus[j], failed = _fit(grid, tail(x, start), tail(weights, start), points)
            if any_lane(failed):
                return first_failure(failed, first, out.size // _BYTES)
            upper = splat(0)
            for k in range(4):
                indices[k] = gather(grid.indices, points[k])
                upper |= indices[k] >> 8 << 3 * k
            halves[1 + 2 * j] = indices[0] & 0xFF | (indices[1] & 0xFF) << 8
            halves[2 + 2 * j] = indices[2] & 0xFF | (indices[3] & 0xFF) << 8
            halves[17 + j] = upper
        d, nothing = code_scales(scales, 8, 7, scale_codes)
        halves[0] = to_half_bits(d * _FUDGE)
        for j in range(8):
            halves[17 + j] = halves[17 + j] | select(nothing, 0, scale_codes[j] << 12 | minus[j] << 15)
        join_halves(halves, _HALVES, words)
        store_blocks(words, out, first, _BYTES)
    return -1


@inlinable
def _fit(grid: PointTables, x: FloatTile, weights: FloatTile, points: IntTile) -> tuple[Floats, Ints, Mask]:
    """Return scale, 1 for the shift -1/8, and where the search failed; fill the 4 points of a sub-block."""
    keys, order, carried = float_tile(_PLACES), int_tile(_PLACES), float_tile(_PLACES)
    codes, lows = int_tile(_SIZE), float_tile(4)
    for i in range(_SIZE):
        keys[i], carried[i] = x[i], weights[i]
    sort_32(keys, order, carried)
    scale, cuts = _search_cuts(keys, carried)
    active = ~(largest_magnitude(x, _SIZE) < _EMPTY) & (cuts != NO_CUT)
    flip = scale < ZERO
    cuts = select(active, cuts, 0)
    codes_of_cuts(x, keys, order, _SIZE, cuts >> 8, cuts >> 1 & 0x7F, flip, codes)
    minus = active & (((cuts & 1) != 0) ^ flip)
    for k in range(_SIZE // GROUP):
        lows[k] = select(minus, splat(MINUS_LOW), PLUS_LOW)
    scale = select(flip, -scale, scale)
    scale, failed = code_groups(grid, Groups(x, weights, lows, codes, points), _SIZE, active, scale)
    return scale, select(minus, splat(1), 0), failed


@inlinable
def _search_cuts(x: FloatTile, weights: FloatTile) -> tuple[Floats, Ints]:
    """Return the best scale for sorted x and its cuts, `first << 8 | second << 1 | minus`, or NO_CUT.

    Of the elements, `first` get code 0, those up to `second` code 1. The gain of a scale and codes is the
    square of sum(weight * x * level) over sum(weight * level**2).
    """
    sum_x, sum_w = float_tile(_PLACES), float_tile(_PLACES)
    plus_x, minus_x = float_tile(_PLACES), float_tile(_PLACES)
    plus_w, minus_w = float_tile(_PLACES), float_tile(_PLACES)
    total_x = splat(ZERO)
    total_w = splat(ZERO)
    for i in range(_SIZE):
        sum_x[i], sum_w[i] = total_x, total_w
        total_x += weights[i] * x[i]
        total_w += weights[i]
    sum_x[_SIZE], sum_w[_SIZE] = total_x, total_w
    for i in range(_PLACES):
        rest_x, rest_w = total_x - sum_x[i], total_w - sum_w[i]
        plus_x[i], minus_x[i] = rest_x * PLUS_HIGH, rest_x * MINUS_HIGH
        plus_w[i], minus_w[i] = rest_w * PLUS_HIGH * PLUS_HIGH, rest_w * MINUS_HIGH * MINUS_HIGH

    gain = splat(WORST)
    scale = splat(ZERO)
    cuts = splat(NO_CUT)
    for first in range(_PLACES):
        low_x, low_w = sum_x[first], sum_w[first]
        low_plus_x, low_minus_x = low_x * PLUS_LOW, low_x * MINUS_LOW
        low_plus_w, low_minus_w = low_w * PLUS_LOW * PLUS_LOW, low_w * MINUS_LOW * MINUS_LOW
        for second in range(first, _PLACES):
            middle_x = (sum_x[second] - low_x) * PLUS_MIDDLE
            middle_w = (sum_w[second] - low_w) * PLUS_MIDDLE * PLUS_MIDDLE
            plus_xq = low_plus_x + middle_x + plus_x[second]
            plus_qq = low_plus_w + middle_w + plus_w[second]
            minus_xq = low_minus_x - middle_x + minus_x[second]  # MINUS_MIDDLE is -PLUS_MIDDLE
            minus_qq = low_minus_w + middle_w + minus_w[second]
            plus_square, minus_square = plus_xq * plus_xq, minus_xq * minus_xq
            if any_lane((plus_square > gain * plus_qq) | (minus_square > gain * minus_qq)):  # seldom
                place = first << 8 | second << 1
                plus = (plus_qq > ZERO) & (plus_square > gain * plus_qq)
                scale = select(plus, plus_xq / plus_qq, scale)
                gain = select(plus, scale * plus_xq, gain)
                cuts = select(plus, place, cuts)
                minus = (minus_qq > ZERO) & (minus_square > gain * minus_qq)
                scale = select(minus, minus_xq / minus_qq, scale)
                gain = select(minus, scale * minus_xq, gain)
                cuts = select(minus, place | 1, cuts)
    return scale, cuts


FORMAT = block_format(
    IQ1_S,
    _decode,
    weighted=_quantize,
    tables=lambda: (point_tables(),),
    decode_tables=lambda: (point_values(),),
)
