"""Q3_K: 256 weights in 110 bytes, 3.4375 bits each.

    bytes       field
    0 .. 31     hmask   bit 2 of the codes q: bit j of byte i is that of weight 32 * j + i
    32 .. 95    qs      bits 0 .. 1 of the codes: 32 bytes hold 128, the lowest bits first (packing.pack)
    96 .. 103   scales  bits 0 .. 3 of the scales sc: byte j has those of scales j and j + 8
    104 .. 107          bits 4 .. 5: byte j has those of scales j, j + 4, j + 8 and j + 12, lowest bits first
    108 .. 109  d       float16

The value of weight i = 0 .. 15 in sub-block j = 0 .. 15:

    d * (sc[j] - 32) * (q[16 * j + i] - 4)
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from gguf_tools.format.ggml_types import Q3_K
from quantize.formats.base import Rows, block_dtype, block_format
from quantize.formats.k_quants.super_block import ELEMS, fit_symmetric_sub_blocks, mean_square, weigh
from quantize.formats.search import EMPTY, farthest_from_zero, search_symmetric_of_any, symmetric_codes
from quantize.simd.floats import (
    ONE,
    ZERO,
    clamp,
    float_at,
    from_half_bits,
    nearest_float,
    nearest_int,
    to_half_bits,
)
from quantize.simd.kernel import inlinable, kernel
from quantize.simd.lane_memory import FloatTile, IntTile, float_tile, int_tile, store, tail
from quantize.simd.lanes import LANES, Floats, Ints, any_lane, select, splat, to_float, to_int
from quantize.simd.packing import codes_at, pack
from quantize.simd.tiles import first_not_finite, load_blocks, load_importances, padded_words, store_blocks

BLOCK = block_dtype(Q3_K)
_BYTES = BLOCK.itemsize
_WORDS = padded_words(_BYTES)
_HALF = 4
_SCALE_HALF = 32


@kernel
def _decode(data: npt.NDArray[np.uint8], out: npt.NDArray[np.float32]) -> None:
    for k in range(data.size // _BYTES):
        start = k * _BYTES
        d = float_at(data, start + 108)
        for j in range(16):
            lower = data[start + 96 + j % 8] >> 4 * (j // 8) & 0xF
            upper = data[start + 104 + j % 4] >> 2 * (j // 4) & 3
            scale = d * np.float32((lower | upper << 4) - _SCALE_HALF)
            codes = codes_at(data, start + 32, 16 * j, 2, 32) | codes_at(data, start, 16 * j, 1, 32) << 2
            store(out, k * ELEMS + 16 * j, scale * to_float(codes - _HALF))


@kernel
def _quantize_weighted(source: Rows, importances: npt.NDArray[np.float32], out: npt.NDArray[np.uint8]) -> int:
    x, weights, sums = float_tile(256), float_tile(256), float_tile(16)
    scales, inverses = float_tile(16), float_tile(16)
    scale_codes, codes = int_tile(16), int_tile(256)
    words = int_tile(_WORDS)
    for first in range(0, out.size // _BYTES, LANES):
        if not load_blocks(source, first, 256, x):
            return first_not_finite(x, 256, first, out.size // _BYTES)
        load_importances(importances, first, 256, weights)
        weigh(x, weights, mean_square(x, np.float32(2)), 16, sums)
        fit_symmetric_sub_blocks(x, weights, _HALF, scales, inverses)
        d, inverse_d = search_symmetric_of_any(scales, sums, 16, _SCALE_HALF)
        half_d = to_half_bits(d)
        largest, _extreme = farthest_from_zero(scales, 16)
        for j in range(16):
            code = clamp(nearest_int(inverse_d * scales[j]), -_SCALE_HALF, _SCALE_HALF - 1) + _SCALE_HALF
            scale_codes[j] = select(largest < EMPTY, 0, code)
            scale = from_half_bits(half_d) * to_float(scale_codes[j] - _SCALE_HALF)
            symmetric_codes(tail(x, 16 * j), scale, inverses[j], 16, _HALF, tail(codes, 16 * j))
        _pack(codes, scale_codes, half_d, words)
        store_blocks(words, out, first, _BYTES)
    return -1


@kernel
def _quantize_plain(source: Rows, out: npt.NDArray[np.uint8]) -> int:
    x, scales = float_tile(256), float_tile(16)
    farthest, extremes = float_tile(16), float_tile(16)
    scale_codes, codes = int_tile(16), int_tile(256)
    words = int_tile(_WORDS)
    for first in range(0, out.size // _BYTES, LANES):
        if not load_blocks(source, first, 256, x):
            return first_not_finite(x, 256, first, out.size // _BYTES)
        for j in range(16):  # apart from the searches, so that several sub-blocks are under way at once
            farthest[j], extremes[j] = farthest_from_zero(tail(x, 16 * j), 16)
        for j in range(16):
            scales[j] = _search_plain(tail(x, 16 * j), farthest[j], extremes[j], tail(codes, 16 * j))
        _largest, extreme = farthest_from_zero(scales, 16)
        inverse_d = np.float32(-_SCALE_HALF) / extreme
        half_d = select(extreme == ZERO, 0, to_half_bits(ONE / inverse_d))
        for j in range(16):
            code = nearest_int(inverse_d * scales[j]) << 24 >> 24
            code = clamp(code, -_SCALE_HALF, _SCALE_HALF - 1) + _SCALE_HALF
            scale_codes[j] = select(extreme == ZERO, 0, code)
            scale = from_half_bits(half_d) * to_float(scale_codes[j] - _SCALE_HALF)
            for i in range(16 * j, 16 * (j + 1)):
                stored = clamp(nearest_int(x[i] / scale), -_HALF, _HALF - 1) + _HALF
                codes[i] = select(scale == ZERO, codes[i], stored)
        _pack(codes, scale_codes, half_d, words)
        store_blocks(words, out, first, _BYTES)
    return -1


@inlinable
def _search_plain(x: FloatTile, largest: Floats, extreme: Floats, codes: IntTile) -> Floats:
    """Return the scale of 16 elements and fill `codes`, Ints: make_q3_quants with errors weighed by x**2.

    From the codes that give the largest |x| the level -4, up to five rounds move one code at a time.

    largest, extreme  what `farthest_from_zero` says of x
    """
    empty = largest < EMPTY
    inverse = np.float32(-_HALF) / extreme
    lx, l2 = float_tile(16), float_tile(16)  # what each element adds to the two sums
    sum_lx = splat(ZERO)
    sum_l2 = splat(ZERO)
    for i in range(16):
        weight = x[i] * x[i]
        level = nearest_float(inverse * x[i], -_HALF, _HALF - 1)
        codes[i] = to_int(level)
        lx[i] = weight * x[i] * level
        l2[i] = weight * level * level
        sum_lx += lx[i]
        sum_l2 += l2[i]
    end = 16  # where a whole round, from the last change on, will have changed nothing
    for step in range(5 * 16):
        if step == end:
            break
        i = step & 15
        rest_lx = sum_lx - lx[i]
        rest_l2 = sum_l2 - l2[i]
        code = clamp(nearest_int(x[i] * rest_l2 / rest_lx), -_HALF, _HALF - 1)
        moves = (rest_lx > ZERO) & (code != codes[i])
        if any_lane(moves):  # seldom: as the sums stay, elements need not wait for one another
            weight = x[i] * x[i]
            level = to_float(code)
            more_lx = weight * x[i] * level
            more_l2 = weight * level * level
            new_lx = rest_lx + more_lx
            new_l2 = rest_l2 + more_l2
            better = new_lx * new_lx * sum_l2 > sum_lx * sum_lx * new_l2
            better &= moves & (new_l2 > ZERO)
            codes[i] = select(better, code, codes[i])
            lx[i] = select(better, more_lx, lx[i])
            l2[i] = select(better, more_l2, l2[i])
            sum_lx = select(better, new_lx, sum_lx)
            sum_l2 = select(better, new_l2, sum_l2)
            if any_lane(better):
                end = step + 17
    for i in range(16):
        codes[i] = select(empty, 0, codes[i] + _HALF)
    return select(empty | ~(sum_l2 > ZERO), ZERO, sum_lx / sum_l2)


@inlinable
def _pack(codes: IntTile, scale_codes: IntTile, half_d: Ints, words: IntTile) -> None:
    pack(codes, 2, 1, 32, 32, words)
    pack(codes, 0, 2, 32, 64, tail(words, 8))
    pack(scale_codes, 0, 4, 8, 8, tail(words, 24))
    pack(scale_codes, 4, 2, 4, 4, tail(words, 26))
    words[27] = half_d


FORMAT = block_format(Q3_K, _decode, _quantize_plain, _quantize_weighted)
