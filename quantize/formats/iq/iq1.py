"""IQ1_S and IQ1_M: levels -1, 0 and 1 with a shift, eight at a time from a grid.

Encoding fails with BadWeights where ggml aborts: when squared errors are beyond float32. Blocks that hold a
value twice depend on ggml's C library; see `iq1_search`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from gguf_tools.format.ggml_types import IQ1_M, IQ1_S
from quantize.formats.base import Bytes, Floats32, block_format
from quantize.formats.iq.grid_blocks import (
    ELEMS,
    code_scales,
    join_halves,
    plain_grid_kernel,
    weighted_grid_kernel,
)
from quantize.formats.iq.iq1_search import (
    GROUP,
    MINUS_HIGH,
    MINUS_LOW,
    MINUS_MIDDLE,
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
    level,
    point_tables,
    point_values,
)
from quantize.formats.k_quants.super_block import mean_square, weigh
from quantize.simd.floats import ZERO, float_at, from_half_bits, to_half_bits
from quantize.simd.kernel import inlinable, kernel
from quantize.simd.lane_memory import FloatTile, IntTile, float_tile, gather, int_tile, tail
from quantize.simd.lanes import Floats, Ints, Mask, any_lane, select, splat, to_float
from quantize.simd.sorting import sort_16, sort_32

# ---- IQ1_S

_IQ1_S_BYTES = IQ1_S.block_bytes
_IQ1_S_HALVES = _IQ1_S_BYTES // 2
_IQ1_S_PADDED_HALVES = _IQ1_S_HALVES + 1
_IQ1_S_SIZE = 32
_IQ1_S_PLACES = _IQ1_S_SIZE + 1
_IQ1_S_EMPTY = np.float32(1e-12)
_IQ1_S_FUDGE = np.float32(1.125)


@kernel
def _decode_iq1_s(data: Bytes, values: Floats32, rows: Floats32) -> None:
    """Decode IQ1_S: 256 weights in 50 bytes, 1.5625 bits each.

        bytes       field
        0 .. 1      d    float16
        2 .. 33     qs   the lower 8 bits of the indices of 32 groups of 8 weights: points of the grid IQ1
        34 .. 49    qh   16 bits for each sub-block of 32:
                         bits 0 .. 11   the upper 3 bits of its four indices
                         bits 12 .. 14  its scale sc
                         bit 15         its shift: 1/8 if clear, -1/8 if set

    The value of weight i, where v is -1, 0 or 1 by the grid point:

        d * (2 * sc + 1) * (v + shift)
    """
    for block in range(rows.size // ELEMS):
        offset = block * _IQ1_S_BYTES
        d = float_at(data, offset)
        for j in range(ELEMS // _IQ1_S_SIZE):
            low, high = offset + 2 + 4 * j, offset + 34 + 2 * j
            word = np.int32(data[high]) | np.int32(data[high + 1]) << 8
            scale = d * np.float32(2 * (word >> 12 & 7) + 1)
            for k in range(4):
                index = np.int32(data[low + k]) | (word >> 3 * k & 7) << 8
                start = ELEMS * block + _IQ1_S_SIZE * j + GROUP * k
                decode_group(values, index, word & 0x8000, scale, rows, start)


@weighted_grid_kernel(IQ1_S)
def _quantize_iq1_s(grid: PointTables, x: FloatTile, weights: FloatTile, words: IntTile) -> Mask:
    sums = float_tile(8)
    scales, scale_codes, minus = float_tile(8), int_tile(8), int_tile(8)
    points, indices = int_tile(4), int_tile(4)
    halves = int_tile(_IQ1_S_PADDED_HALVES)
    weigh(x, weights, mean_square(x, np.float32(2)), _IQ1_S_SIZE, sums)
    for j in range(8):
        start = _IQ1_S_SIZE * j
        scales[j], minus[j], failed = _fit_iq1_s(grid, tail(x, start), tail(weights, start), points)
        if any_lane(failed):
            return failed
        upper = splat(0)
        for k in range(4):
            indices[k] = gather(grid.indices, points[k])
            upper |= indices[k] >> 8 << 3 * k
        halves[1 + 2 * j] = indices[0] & 0xFF | (indices[1] & 0xFF) << 8
        halves[2 + 2 * j] = indices[2] & 0xFF | (indices[3] & 0xFF) << 8
        halves[17 + j] = upper
    d, nothing = code_scales(scales, 8, 7, scale_codes)
    halves[0] = to_half_bits(d * _IQ1_S_FUDGE)
    for j in range(8):
        halves[17 + j] = halves[17 + j] | select(nothing, 0, scale_codes[j] << 12 | minus[j] << 15)
    join_halves(halves, _IQ1_S_HALVES, words)
    return failed


@inlinable
def _fit_iq1_s(
    grid: PointTables, x: FloatTile, weights: FloatTile, points: IntTile
) -> tuple[Floats, Ints, Mask]:
    """Return scale, 1 for the shift -1/8, and where the search failed; fill the 4 points of a sub-block."""
    keys, order, carried = float_tile(_IQ1_S_PLACES), int_tile(_IQ1_S_PLACES), float_tile(_IQ1_S_PLACES)
    codes, lows = int_tile(_IQ1_S_SIZE), float_tile(4)
    for i in range(_IQ1_S_SIZE):
        keys[i], carried[i] = x[i], weights[i]
    sort_32(keys, order, carried)
    scale, cuts = _search_cuts_iq1_s(keys, carried)
    active = ~(largest_magnitude(x, _IQ1_S_SIZE) < _IQ1_S_EMPTY) & (cuts != NO_CUT)
    flip = scale < ZERO
    cuts = select(active, cuts, 0)
    codes_of_cuts(x, keys, order, _IQ1_S_SIZE, cuts >> 8, cuts >> 1 & 0x7F, flip, codes)
    minus = active & (((cuts & 1) != 0) ^ flip)
    for k in range(_IQ1_S_SIZE // GROUP):
        lows[k] = select(minus, splat(MINUS_LOW), PLUS_LOW)
    scale = select(flip, -scale, scale)
    scale, failed = code_groups(grid, Groups(x, weights, lows, codes, points), _IQ1_S_SIZE, active, scale)
    return scale, select(minus, splat(1), 0), failed


@inlinable
def _search_cuts_iq1_s(x: FloatTile, weights: FloatTile) -> tuple[Floats, Ints]:
    """Return the best scale for sorted x and its cuts, `first << 8 | second << 1 | minus`, or NO_CUT.

    Of the elements, `first` get code 0, those up to `second` code 1. The gain of a scale and codes is the
    square of sum(weight * x * level) over sum(weight * level**2).
    """
    sum_x, sum_w = float_tile(_IQ1_S_PLACES), float_tile(_IQ1_S_PLACES)
    plus_x, minus_x = float_tile(_IQ1_S_PLACES), float_tile(_IQ1_S_PLACES)
    plus_w, minus_w = float_tile(_IQ1_S_PLACES), float_tile(_IQ1_S_PLACES)
    total_x = splat(ZERO)
    total_w = splat(ZERO)
    for i in range(_IQ1_S_SIZE):
        sum_x[i], sum_w[i] = total_x, total_w
        total_x += weights[i] * x[i]
        total_w += weights[i]
    sum_x[_IQ1_S_SIZE], sum_w[_IQ1_S_SIZE] = total_x, total_w
    for i in range(_IQ1_S_PLACES):
        rest_x, rest_w = total_x - sum_x[i], total_w - sum_w[i]
        plus_x[i], minus_x[i] = rest_x * PLUS_HIGH, rest_x * MINUS_HIGH
        plus_w[i], minus_w[i] = rest_w * PLUS_HIGH * PLUS_HIGH, rest_w * MINUS_HIGH * MINUS_HIGH

    gain = splat(WORST)
    scale = splat(ZERO)
    cuts = splat(NO_CUT)
    for first in range(_IQ1_S_PLACES):
        low_x, low_w = sum_x[first], sum_w[first]
        low_plus_x, low_minus_x = low_x * PLUS_LOW, low_x * MINUS_LOW
        low_plus_w, low_minus_w = low_w * PLUS_LOW * PLUS_LOW, low_w * MINUS_LOW * MINUS_LOW
        for second in range(first, _IQ1_S_PLACES):
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


# ---- IQ1_M

_IQ1_M_BYTES = IQ1_M.block_bytes
_IQ1_M_SIZE = 16
_IQ1_M_PLACES = _IQ1_M_SIZE + 1
_IQ1_M_SUMS = 2 * _IQ1_M_PLACES
_IQ1_M_EMPTY = np.float32(1e-7)
_IQ1_M_FUDGE = np.float32(1.1125)
_PLUS_STEP = PLUS_LOW * PLUS_LOW - PLUS_MIDDLE * PLUS_MIDDLE
_PLUS_TOP_STEP = PLUS_MIDDLE * PLUS_MIDDLE - PLUS_HIGH * PLUS_HIGH
_MINUS_STEP = MINUS_LOW * MINUS_LOW - MINUS_MIDDLE * MINUS_MIDDLE
_MINUS_TOP_STEP = MINUS_MIDDLE * MINUS_MIDDLE - MINUS_HIGH * MINUS_HIGH
"""Differences of squared levels: of codes 0 and 1, of codes 1 and 2. Exact."""


class Found(NamedTuple):
    """Results for each of 32 groups (points, lows) or 16 sub-blocks (scales)."""

    points: IntTile
    lows: FloatTile
    scales: FloatTile


@kernel
def _decode_iq1_m(data: Bytes, values: Floats32, rows: Floats32) -> None:
    """Decode IQ1_M: 256 weights in 56 bytes, 1.75 bits each.

        bytes       field
        0 .. 31     qs      the lower 8 bits of the indices of 32 groups of 8 weights: points of the grid IQ1
        32 .. 47    qh      4 bits for each group, two in a byte, the lower bits first:
                            bits 0 .. 2  the upper 3 bits of its index
                            bit 3        its shift: 1/8 if clear, -1/8 if set
        48 .. 55    scales  four times 16 bits:
                            bits 0 .. 11   3 bits for each of four sub-blocks of 16: its scale sc
                            bits 12 .. 15  4 bits of d, a float16, the lowest ones first

    The value of weight i, where v is -1, 0 or 1 by the grid point:

        d * (2 * sc + 1) * (v + shift)
    """
    for block in range(rows.size // ELEMS):
        offset = block * _IQ1_M_BYTES
        half = np.int32(0)
        for n in range(4):
            half |= (np.int32(data[offset + 49 + 2 * n]) >> 4) << 4 * n
        d = from_half_bits(half)
        for j in range(ELEMS // _IQ1_M_SIZE):
            place = offset + 48 + 2 * (j // 4)
            word = np.int32(data[place]) | np.int32(data[place + 1]) << 8
            scale = d * np.float32(2 * (word >> 3 * (j % 4) & 7) + 1)
            for k in range(2):
                nibble = np.int32(data[offset + 32 + j]) >> 4 * k
                index = np.int32(data[offset + 2 * j + k]) | (nibble & 7) << 8
                start = ELEMS * block + _IQ1_M_SIZE * j + GROUP * k
                decode_group(values, index, nibble & 8, scale, rows, start)


@weighted_grid_kernel(IQ1_M)
def _quantize_weighted_iq1_m(grid: PointTables, x: FloatTile, weights: FloatTile, words: IntTile) -> Mask:
    sums = float_tile(16)
    weigh(x, weights, mean_square(x, np.float32(2)), _IQ1_M_SIZE, sums)
    return _encode_iq1_m(grid, x, weights, words)


@plain_grid_kernel(IQ1_M)
def _quantize_plain_iq1_m(grid: PointTables, x: FloatTile, words: IntTile) -> Mask:
    weights = float_tile(256)
    for i in range(256):
        weights[i] = x[i] * x[i]
    return _encode_iq1_m(grid, x, weights, words)


@inlinable
def _encode_iq1_m(grid: PointTables, x: FloatTile, weights: FloatTile, words: IntTile) -> Mask:
    """Fill `words` and return where blocks can't be encoded."""
    found = Found(int_tile(32), float_tile(32), float_tile(16))
    scale_codes = int_tile(16)
    failed = _fit_iq1_m(grid, x, weights, found, 0)
    for j in range(1, 16):
        failed |= _fit_iq1_m(grid, x, weights, found, j)
    d, nothing = code_scales(found.scales, 16, 7, scale_codes)
    _pack_indices_iq1_m(grid, found, nothing, words)
    half = to_half_bits(_refit_iq1_m(x, weights, found, scale_codes, d) * _IQ1_M_FUDGE)
    half = select(nothing, 0, half)
    for k in range(2):
        word = splat(0)
        for n in range(2):
            for j in range(4):
                word |= scale_codes[8 * k + 4 * n + j] << 16 * n + 3 * j
            word |= (half >> 8 * k + 4 * n & 0xF) << 16 * n + 12
        words[12 + k] = word
    return failed


@inlinable
def _fit_iq1_m(grid: PointTables, x: FloatTile, weights: FloatTile, found: Found, j: int) -> Mask:
    """Fill what was found for sub-block j and return where there is nothing to find."""
    keys, order, carried = float_tile(_IQ1_M_PLACES), int_tile(_IQ1_M_PLACES), float_tile(_IQ1_M_PLACES)
    codes = int_tile(_IQ1_M_SIZE)
    sub, sub_weights, lows = tail(x, _IQ1_M_SIZE * j), tail(weights, _IQ1_M_SIZE * j), tail(found.lows, 2 * j)
    for i in range(_IQ1_M_SIZE):
        keys[i], carried[i] = sub[i], sub_weights[i]
    sort_16(keys, order, carried)
    scale, cuts = _search_cuts_iq1_m(keys, order, carried)
    active = ~(largest_magnitude(sub, _IQ1_M_SIZE) < _IQ1_M_EMPTY) & (cuts != NO_CUT)
    flip = scale < ZERO
    cuts = select(active, cuts, 0)
    codes_of_cuts(sub, keys, order, _IQ1_M_SIZE, cuts >> 8, cuts >> 2 & 0x3F, flip, codes)
    lows[0] = select(active & (((cuts & 2) != 0) ^ flip), splat(MINUS_LOW), PLUS_LOW)
    lows[1] = select(active & (((cuts & 1) != 0) ^ flip), splat(MINUS_LOW), PLUS_LOW)
    scale = select(flip, -scale, scale)
    groups = Groups(sub, sub_weights, lows, codes, tail(found.points, 2 * j))
    found.scales[j], failed = code_groups(grid, groups, _IQ1_M_SIZE, active, scale)
    return failed


@inlinable
def _search_cuts_iq1_m(x: FloatTile, order: IntTile, weights: FloatTile) -> tuple[Floats, Ints]:
    """Return the best scale for sorted x and its cuts, `first << 8 | second << 2 | shifts`, or NO_CUT.

    Of the elements, `first` get code 0, those up to `second` code 1. Bit 1 of shifts stands for a shift of
    -1/8 in the first group, bit 0 in the second; `order` tells which of the two an element is from. The gain
    of a scale and codes is the square of sum(weight * x * level) over sum(weight * level**2). A step in code
    is a step of 1 in level: below each cut, sum(weight * x) comes off once more than if it had the top level.
    """
    sum_x, sum_w = float_tile(_IQ1_M_SUMS), float_tile(_IQ1_M_SUMS)
    for half in range(2):
        total_x = splat(ZERO)
        total_w = splat(ZERO)
        for i in range(_IQ1_M_SIZE):
            sum_x[_IQ1_M_PLACES * half + i], sum_w[_IQ1_M_PLACES * half + i] = total_x, total_w
            inside = order[i] >> 3 == half
            total_x = select(inside, total_x + weights[i] * x[i], total_x)
            total_w = select(inside, total_w + weights[i], total_w)
        sum_x[_IQ1_M_PLACES * half + _IQ1_M_SIZE], sum_w[_IQ1_M_PLACES * half + _IQ1_M_SIZE] = (
            total_x,
            total_w,
        )
    ends = _IQ1_M_PLACES - 1
    plus_x_0, plus_x_1 = sum_x[ends] * PLUS_HIGH, sum_x[_IQ1_M_PLACES + ends] * PLUS_HIGH
    minus_x_0, minus_x_1 = sum_x[ends] * MINUS_HIGH, sum_x[_IQ1_M_PLACES + ends] * MINUS_HIGH
    plus_w_0 = sum_w[ends] * PLUS_HIGH * PLUS_HIGH
    plus_w_1 = sum_w[_IQ1_M_PLACES + ends] * PLUS_HIGH * PLUS_HIGH
    minus_w_0 = sum_w[ends] * MINUS_HIGH * MINUS_HIGH
    minus_w_1 = sum_w[_IQ1_M_PLACES + ends] * MINUS_HIGH * MINUS_HIGH

    top_plus, top_minus = float_tile(_IQ1_M_SUMS), float_tile(_IQ1_M_SUMS)
    for i in range(_IQ1_M_SUMS):
        top_plus[i], top_minus[i] = sum_w[i] * _PLUS_TOP_STEP, sum_w[i] * _MINUS_TOP_STEP

    gain = splat(WORST)
    scale = splat(ZERO)
    cuts = splat(NO_CUT)
    for first in range(_IQ1_M_PLACES):
        x_0, w_0 = sum_x[first], sum_w[first]
        x_1, w_1 = sum_x[_IQ1_M_PLACES + first], sum_w[_IQ1_M_PLACES + first]
        low_plus_0, low_minus_0 = plus_w_0 + w_0 * _PLUS_STEP, minus_w_0 + w_0 * _MINUS_STEP
        low_plus_1, low_minus_1 = plus_w_1 + w_1 * _PLUS_STEP, minus_w_1 + w_1 * _MINUS_STEP
        for second in range(first, _IQ1_M_PLACES):
            below_0, below_1 = x_0 + sum_x[second], x_1 + sum_x[_IQ1_M_PLACES + second]
            xq_plus_0, xq_minus_0 = plus_x_0 - below_0, minus_x_0 - below_0
            xq_plus_1, xq_minus_1 = plus_x_1 - below_1, minus_x_1 - below_1
            qq_plus_0, qq_minus_0 = low_plus_0 + top_plus[second], low_minus_0 + top_minus[second]
            qq_plus_1 = low_plus_1 + top_plus[_IQ1_M_PLACES + second]
            qq_minus_1 = low_minus_1 + top_minus[_IQ1_M_PLACES + second]
            place = first << 8 | second << 2
            xq_0, qq_0 = xq_plus_0 + xq_plus_1, qq_plus_0 + qq_plus_1
            xq_1, qq_1 = xq_plus_0 + xq_minus_1, qq_plus_0 + qq_minus_1
            xq_2, qq_2 = xq_minus_0 + xq_plus_1, qq_minus_0 + qq_plus_1
            xq_3, qq_3 = xq_minus_0 + xq_minus_1, qq_minus_0 + qq_minus_1
            likely = (xq_0 * xq_0 > gain * qq_0) | (xq_1 * xq_1 > gain * qq_1)
            likely |= (xq_2 * xq_2 > gain * qq_2) | (xq_3 * xq_3 > gain * qq_3)
            if any_lane(likely):
                scale, gain, cuts = _take_iq1_m(xq_0, qq_0, place, scale, gain, cuts)
                scale, gain, cuts = _take_iq1_m(xq_1, qq_1, place | 1, scale, gain, cuts)
                scale, gain, cuts = _take_iq1_m(xq_2, qq_2, place | 2, scale, gain, cuts)
                scale, gain, cuts = _take_iq1_m(xq_3, qq_3, place | 3, scale, gain, cuts)
    return scale, cuts


@inlinable
def _take_iq1_m(
    xq: Floats, qq: Floats, place: int, scale: Floats, gain: Floats, cuts: Ints
) -> tuple[Floats, Floats, Ints]:
    """Return scale, gain and cuts, replaced by those of a candidate where it gains more."""
    better = (qq > ZERO) & (xq * xq > gain * qq)
    scale = select(better, xq / qq, scale)
    return scale, select(better, scale * xq, gain), select(better, place, cuts)


@inlinable
def _pack_indices_iq1_m(grid: PointTables, found: Found, nothing: Mask, words: IntTile) -> None:
    """Fill the words of qs and qh; blocks of nothing but zeros keep all shifts clear."""
    indices = int_tile(32)
    for group in range(32):
        indices[group] = gather(grid.indices, found.points[group])
    for k in range(8):
        low = splat(0)
        for n in range(4):
            low |= (indices[4 * k + n] & 0xFF) << 8 * n
        words[k] = low
    for k in range(4):
        high = splat(0)
        for n in range(8):
            group = 8 * k + n
            minus = ~nothing & (found.lows[group] == MINUS_LOW)
            high |= (indices[group] >> 8 | select(minus, splat(8), 0)) << 4 * n
        words[8 + k] = high


@inlinable
def _refit_iq1_m(x: FloatTile, weights: FloatTile, found: Found, scale_codes: IntTile, d: Floats) -> Floats:
    """Return the scale that fits best all that is stored beside it; d if there is none."""
    sum_xq = splat(ZERO)
    sum_qq = splat(ZERO)
    for group in range(32):
        factor = to_float(2 * scale_codes[group // 2] + 1)
        for i in range(GROUP * group, GROUP * (group + 1)):
            stored = level(found.points[group], i % GROUP, found.lows[group]) * factor
            weighted = weights[i] * stored
            sum_xq += weighted * x[i]
            sum_qq += weighted * stored
    return select(sum_qq > ZERO, sum_xq / sum_qq, d)


FORMATS = (
    block_format(
        IQ1_S,
        _decode_iq1_s,
        weighted=_quantize_iq1_s,
        tables=lambda: (point_tables(),),
        decode_tables=lambda: (point_values(),),
    ),
    block_format(
        IQ1_M,
        _decode_iq1_m,
        _quantize_plain_iq1_m,
        _quantize_weighted_iq1_m,
        tables=lambda: (point_tables(),),
        decode_tables=lambda: (point_values(),),
    ),
)
