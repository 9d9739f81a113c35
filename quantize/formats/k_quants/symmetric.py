"""Q3_K and Q6_K: sub-blocks with a scale, and codes around zero."""

from __future__ import annotations

import numpy as np

from gguf_tools.format.ggml_types import Q3_K, Q6_K
from quantize.formats.base import Bytes, Floats32, block_format
from quantize.formats.block_kernels import plain_kernel, weighted_kernel
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
from quantize.simd.lanes import Floats, Ints, any_lane, minimum, select, splat, to_float, to_int
from quantize.simd.packing import codes_at, pack

# ---- Q3_K

_Q3_K_BYTES = Q3_K.block_bytes
_Q3_K_HALF = 4
_SCALE_HALF = 32


@kernel
def _decode_q3_k(data: Bytes, out: Floats32) -> None:
    """Decode Q3_K: 256 weights in 110 bytes, 3.4375 bits each.

        bytes       field
        0 .. 31     hmask   bit 2 of the codes q: bit j of byte i is that of weight 32 * j + i
        32 .. 95    qs      bits 0 .. 1 of the codes: 32 bytes hold 128, the lowest bits first
        96 .. 103   scales  bits 0 .. 3 of the scales sc: byte j has those of scales j and j + 8
        104 .. 107          bits 4 .. 5: byte j has those of scales j, j + 4, j + 8, j + 12, lowest bits first
        108 .. 109  d       float16

    The value of weight i = 0 .. 15 in sub-block j = 0 .. 15:

        d * (sc[j] - 32) * (q[16 * j + i] - 4)
    """
    for k in range(data.size // _Q3_K_BYTES):
        start = k * _Q3_K_BYTES
        d = float_at(data, start + 108)
        for j in range(16):
            lower = data[start + 96 + j % 8] >> 4 * (j // 8) & 0xF
            upper = data[start + 104 + j % 4] >> 2 * (j // 4) & 3
            scale = d * np.float32((lower | upper << 4) - _SCALE_HALF)
            codes = codes_at(data, start + 32, 16 * j, 2, 32) | codes_at(data, start, 16 * j, 1, 32) << 2
            store(out, k * ELEMS + 16 * j, scale * to_float(codes - _Q3_K_HALF))


@weighted_kernel(Q3_K)
def _quantize_weighted_q3_k(x: FloatTile, weights: FloatTile, words: IntTile) -> None:
    sums = float_tile(16)
    scales, inverses = float_tile(16), float_tile(16)
    scale_codes, codes = int_tile(16), int_tile(256)
    weigh(x, weights, mean_square(x, np.float32(2)), 16, sums)
    fit_symmetric_sub_blocks(x, weights, _Q3_K_HALF, scales, inverses)
    d, inverse_d = search_symmetric_of_any(scales, sums, 16, _SCALE_HALF)
    half_d = to_half_bits(d)
    largest, _extreme = farthest_from_zero(scales, 16)
    for j in range(16):
        code = clamp(nearest_int(inverse_d * scales[j]), -_SCALE_HALF, _SCALE_HALF - 1) + _SCALE_HALF
        scale_codes[j] = select(largest < EMPTY, 0, code)
        scale = from_half_bits(half_d) * to_float(scale_codes[j] - _SCALE_HALF)
        symmetric_codes(tail(x, 16 * j), scale, inverses[j], 16, _Q3_K_HALF, tail(codes, 16 * j))
    _pack_q3_k(codes, scale_codes, half_d, words)


@plain_kernel(Q3_K)
def _quantize_plain_q3_k(x: FloatTile, words: IntTile) -> None:
    scales = float_tile(16)
    farthest, extremes = float_tile(16), float_tile(16)
    scale_codes, codes = int_tile(16), int_tile(256)
    for j in range(16):  # apart from the searches, so that several sub-blocks are under way at once
        farthest[j], extremes[j] = farthest_from_zero(tail(x, 16 * j), 16)
    for j in range(16):
        scales[j] = _search_plain_q3_k(tail(x, 16 * j), farthest[j], extremes[j], tail(codes, 16 * j))
    _largest, extreme = farthest_from_zero(scales, 16)
    inverse_d = np.float32(-_SCALE_HALF) / extreme
    half_d = select(extreme == ZERO, 0, to_half_bits(ONE / inverse_d))
    for j in range(16):
        code = nearest_int(inverse_d * scales[j]) << 24 >> 24
        code = clamp(code, -_SCALE_HALF, _SCALE_HALF - 1) + _SCALE_HALF
        scale_codes[j] = select(extreme == ZERO, 0, code)
        scale = from_half_bits(half_d) * to_float(scale_codes[j] - _SCALE_HALF)
        for i in range(16 * j, 16 * (j + 1)):
            stored = clamp(nearest_int(x[i] / scale), -_Q3_K_HALF, _Q3_K_HALF - 1) + _Q3_K_HALF
            codes[i] = select(scale == ZERO, codes[i], stored)
    _pack_q3_k(codes, scale_codes, half_d, words)


@inlinable
def _search_plain_q3_k(x: FloatTile, largest: Floats, extreme: Floats, codes: IntTile) -> Floats:
    """Return the scale of 16 elements and fill `codes`, Ints: make_q3_quants with errors weighed by x**2.

    From the codes that give the largest |x| the level -4, up to five rounds move one code at a time.

    largest, extreme  what `farthest_from_zero` says of x
    """
    empty = largest < EMPTY
    inverse = np.float32(-_Q3_K_HALF) / extreme
    lx, l2 = float_tile(16), float_tile(16)  # what each element adds to the two sums
    sum_lx = splat(ZERO)
    sum_l2 = splat(ZERO)
    for i in range(16):
        weight = x[i] * x[i]
        level = nearest_float(inverse * x[i], -_Q3_K_HALF, _Q3_K_HALF - 1)
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
        code = clamp(nearest_int(x[i] * rest_l2 / rest_lx), -_Q3_K_HALF, _Q3_K_HALF - 1)
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
        codes[i] = select(empty, 0, codes[i] + _Q3_K_HALF)
    return select(empty | ~(sum_l2 > ZERO), ZERO, sum_lx / sum_l2)


@inlinable
def _pack_q3_k(codes: IntTile, scale_codes: IntTile, half_d: Ints, words: IntTile) -> None:
    pack(codes, 2, 1, 32, 32, words)
    pack(codes, 0, 2, 32, 64, tail(words, 8))
    pack(scale_codes, 0, 4, 8, 8, tail(words, 24))
    pack(scale_codes, 4, 2, 4, 4, tail(words, 26))
    words[27] = half_d


# ---- Q6_K

_Q6_K_BYTES = Q6_K.block_bytes
_Q6_K_HALF = 32


@kernel
def _decode_q6_k(data: Bytes, out: Floats32) -> None:
    """Decode Q6_K: 256 weights in 210 bytes, 6.5625 bits each.

        bytes       field
        0 .. 127    ql      bits 0 .. 3 of the codes q: 64 bytes hold 128, the lower halves first
        128 .. 191  qh      bits 4 .. 5 of the codes: 32 bytes hold 128, the lowest bits first
        192 .. 207  scales  int8, sc[j] of sub-block j
        208 .. 209  d       float16

    The value of weight i = 0 .. 15 in sub-block j = 0 .. 15:

        d * sc[j] * (q[16 * j + i] - 32)
    """
    for k in range(data.size // _Q6_K_BYTES):
        start = k * _Q6_K_BYTES
        d = float_at(data, start + 208)
        for j in range(16):
            scale = d * np.float32((data[start + 192 + j] ^ 0x80) - 0x80)
            codes = codes_at(data, start, 16 * j, 4, 64) | codes_at(data, start + 128, 16 * j, 2, 32) << 4
            store(out, k * ELEMS + 16 * j, scale * to_float(codes - _Q6_K_HALF))


@weighted_kernel(Q6_K)
def _quantize_weighted_q6_k(x: FloatTile, weights: FloatTile, words: IntTile) -> None:
    _encode_q6_k(x, weights, words)


@plain_kernel(Q6_K)
def _quantize_plain_q6_k(x: FloatTile, words: IntTile) -> None:
    weights = float_tile(256)
    for i in range(256):
        weights[i] = x[i] * x[i]
    _encode_q6_k(x, weights, words)


@inlinable
def _encode_q6_k(x: FloatTile, weights: FloatTile, words: IntTile) -> None:
    """Fill `words`."""
    scales, inverses = float_tile(16), float_tile(16)
    scale_codes, codes = int_tile(16), int_tile(256)
    fit_symmetric_sub_blocks(x, weights, _Q6_K_HALF, scales, inverses)
    largest, extreme = farthest_from_zero(scales, 16)
    inverse_d = np.float32(-128) / extreme
    half_d = to_half_bits(ONE / inverse_d)
    d = from_half_bits(half_d)
    for j in range(16):
        code = minimum(nearest_int(inverse_d * scales[j]), 127) << 24 >> 24
        scale_codes[j] = code
        symmetric_codes(tail(x, 16 * j), d * to_float(code), inverses[j], 16, _Q6_K_HALF, tail(codes, 16 * j))
    pack(codes, 0, 4, 64, 128, words)
    pack(codes, 4, 2, 32, 64, tail(words, 32))
    pack(scale_codes, 0, 8, 16, 16, tail(words, 48))
    words[52] = half_d
    empty = largest < EMPTY
    if any_lane(empty):
        for k in range(53):
            words[k] = select(empty, splat(0), words[k])


FORMATS = (
    block_format(Q3_K, _decode_q3_k, _quantize_plain_q3_k, _quantize_weighted_q3_k),
    block_format(Q6_K, _decode_q6_k, _quantize_plain_q6_k, _quantize_weighted_q6_k),
)
