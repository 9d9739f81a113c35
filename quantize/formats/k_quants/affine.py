"""Q2_K, Q4_K and Q5_K: sub-blocks with a scale and a minimum."""

from __future__ import annotations

import numpy as np

from gguf_tools.format.ggml_types import Q2_K, Q4_K, Q5_K
from quantize.formats.base import Bytes, Floats32, block_format
from quantize.formats.block_kernels import plain_kernel, weighted_kernel
from quantize.formats.k_quants.super_block import (
    ELEMS,
    AffineFit,
    code_by_largest,
    codes_as_stored,
    fit_sub_blocks,
    fit_sub_blocks_absolute,
    mean_square,
    weigh,
    weigh_by_magnitude,
)
from quantize.formats.search import affine_codes, search_positive
from quantize.simd.floats import float_at, from_half_bits, to_half_bits
from quantize.simd.kernel import inlinable, kernel
from quantize.simd.lane_memory import FloatTile, IntTile, float_tile, int_tile, store, tail
from quantize.simd.lanes import LANES, absolute, minimum, shift_right_logical, to_float
from quantize.simd.packing import codes_at, pack, pack_scales, scale_at

# ---- Q2_K

_Q2_K_BYTES = Q2_K.block_bytes
_Q2_K_D_WORD = 20
_Q2_K_TOP = 3
_Q2_K_SCALE_TOP = 15


@kernel
def _decode_q2_k(data: Bytes, out: Floats32) -> None:
    """Decode Q2_K: 256 weights in 84 bytes, 2.625 bits each.

        bytes     field
        0 .. 15   scales  byte j: scale sc[j] in the lower 4 bits, minimum m[j] in the upper 4
        16 .. 79  qs      codes q of 2 bits: 32 bytes hold 128, the lowest bits first (packing.pack)
        80 .. 81  d       float16
        82 .. 83  dmin    float16

    The value of weight i = 0 .. 15 in sub-block j = 0 .. 15:

        d * sc[j] * q[16 * j + i] - dmin * m[j]
    """
    for k in range(data.size // _Q2_K_BYTES):
        start = k * _Q2_K_BYTES
        d, dmin = float_at(data, start + 80), float_at(data, start + 82)
        for j in range(16):
            packed = data[start + j]
            codes = codes_at(data, start + 16, 16 * j, 2, 32)
            weights = d * np.float32(packed & 0xF) * to_float(codes) - dmin * np.float32(packed >> 4)
            store(out, k * ELEMS + 16 * j, weights)


@weighted_kernel(Q2_K)
def _quantize_weighted_q2_k(x: FloatTile, weights: FloatTile, words: IntTile) -> None:
    sums = float_tile(16)
    fit = AffineFit(float_tile(16), float_tile(16), float_tile(16), float_tile(16))
    scale_codes, low_codes = int_tile(16), int_tile(16)
    weigh(x, weights, mean_square(x, np.float32(1)), 16, sums)
    fit_sub_blocks(x, weights, 16, _Q2_K_TOP, np.float32(-0.9), np.float32(0.05), 36, fit)
    d = search_positive(fit.scales, sums, scale_codes, 16, _Q2_K_SCALE_TOP)
    dmin = search_positive(fit.minus_lows, sums, low_codes, 16, _Q2_K_SCALE_TOP)
    words[_Q2_K_D_WORD] = to_half_bits(d) | to_half_bits(dmin) << 16
    _pack_rest_q2_k(x, fit, scale_codes, low_codes, words)


@plain_kernel(Q2_K)
def _quantize_plain_q2_k(x: FloatTile, words: IntTile) -> None:
    weights = float_tile(256)
    fit = AffineFit(float_tile(16), float_tile(16), float_tile(16), float_tile(16))
    scale_codes, low_codes = int_tile(16), int_tile(16)
    for i in range(256):
        weights[i] = absolute(x[i])
    fit_sub_blocks_absolute(x, weights, 16, _Q2_K_TOP, np.float32(-0.5), np.float32(0.1), 15, fit)
    d = code_by_largest(fit.scales, 16, _Q2_K_SCALE_TOP, scale_codes)
    dmin = code_by_largest(fit.minus_lows, 16, _Q2_K_SCALE_TOP, low_codes)
    words[_Q2_K_D_WORD] = to_half_bits(d) | to_half_bits(dmin) << 16
    _pack_rest_q2_k(x, fit, scale_codes, low_codes, words)


@inlinable
def _pack_rest_q2_k(
    x: FloatTile, fit: AffineFit, scale_codes: IntTile, low_codes: IntTile, words: IntTile
) -> None:
    """Fill scales and qs of `words`, where d and dmin are set."""
    codes = int_tile(256)
    d = from_half_bits(words[_Q2_K_D_WORD] & 0xFFFF)
    dmin = from_half_bits(shift_right_logical(words[_Q2_K_D_WORD], 16))
    for j in range(16):
        both = scale_codes[j] | low_codes[j] << 4  # a scale code beyond 4 bits spills into the minimum's
        scale_codes[j] = both
        scale = d * to_float(both & 0xF)
        minus_low = dmin * to_float(both >> 4 & 0xF)
        sub, sub_codes = tail(x, 16 * j), tail(codes, 16 * j)
        affine_codes(sub, scale, minus_low, fit.inverses[j], fit.code_lows[j], 16, _Q2_K_TOP, sub_codes)
    pack(scale_codes, 0, 8, 16, 16, words)
    pack(codes, 0, 2, 32, 64, tail(words, 4))


# ---- Q4_K

_Q4_K_BYTES = Q4_K.block_bytes
_Q4_K_TOP = 15
_Q4_K_SCALE_TOP = 63


@kernel
def _decode_q4_k(data: Bytes, out: Floats32) -> None:
    """Decode Q4_K: 256 weights in 144 bytes, 4.5 bits each.

        bytes      field
        0 .. 1     d       float16
        2 .. 3     dmin    float16
        4 .. 15    scales  8 scales sc and 8 minimums m of 6 bits (packing.pack_scales)
        16 .. 143  qs      codes q of 4 bits: 32 bytes hold 64, the lower halves first (packing.pack)

    The value of weight i = 0 .. 31 in sub-block j = 0 .. 7:

        d * sc[j] * q[32 * j + i] - dmin * m[j]
    """
    for k in range(data.size // _Q4_K_BYTES):
        start = k * _Q4_K_BYTES
        d, dmin = float_at(data, start), float_at(data, start + 2)
        for j in range(8):
            scale = d * scale_at(data, start + 4, 0, j)
            minus_low = dmin * scale_at(data, start + 4, 1, j)
            for i in range(32 * j, 32 * (j + 1), LANES):
                codes = codes_at(data, start + 16, i, 4, 32)
                store(out, k * ELEMS + i, scale * to_float(codes) - minus_low)


@weighted_kernel(Q4_K)
def _quantize_weighted_q4_k(x: FloatTile, weights: FloatTile, words: IntTile) -> None:
    sums, scale_codes, low_codes = float_tile(8), int_tile(8), int_tile(8)
    fit = AffineFit(float_tile(8), float_tile(8), float_tile(8), float_tile(8))
    weigh(x, weights, mean_square(x, np.float32(2)), 32, sums)
    fit_sub_blocks(x, weights, 32, _Q4_K_TOP, np.float32(-0.9), np.float32(0.05), 36, fit)
    d = search_positive(fit.scales, sums, scale_codes, 8, _Q4_K_SCALE_TOP)
    dmin = search_positive(fit.minus_lows, sums, low_codes, 8, _Q4_K_SCALE_TOP)
    words[0] = to_half_bits(d) | to_half_bits(dmin) << 16
    pack_scales(scale_codes, low_codes, tail(words, 1))
    _pack_codes_q4_k(x, fit, words)


@plain_kernel(Q4_K)
def _quantize_plain_q4_k(x: FloatTile, words: IntTile) -> None:
    weights, scale_codes, low_codes = float_tile(256), int_tile(8), int_tile(8)
    fit = AffineFit(float_tile(8), float_tile(8), float_tile(8), float_tile(8))
    weigh_by_magnitude(x, 32, weights)
    fit_sub_blocks(x, weights, 32, _Q4_K_TOP, np.float32(-1), np.float32(0.1), 20, fit)
    d = code_by_largest(fit.scales, 8, _Q4_K_SCALE_TOP, scale_codes)
    dmin = code_by_largest(fit.minus_lows, 8, _Q4_K_SCALE_TOP, low_codes)
    for j in range(8):
        scale_codes[j] = minimum(scale_codes[j], _Q4_K_SCALE_TOP)
        low_codes[j] = minimum(low_codes[j], _Q4_K_SCALE_TOP)
    words[0] = to_half_bits(d) | to_half_bits(dmin) << 16
    pack_scales(scale_codes, low_codes, tail(words, 1))
    _pack_codes_q4_k(x, fit, words)


@inlinable
def _pack_codes_q4_k(x: FloatTile, fit: AffineFit, words: IntTile) -> None:
    """Fill field qs of `words`, whose other fields are set."""
    codes = int_tile(256)
    codes_as_stored(x, fit, words, _Q4_K_TOP, codes)
    pack(codes, 0, 4, 32, 128, tail(words, 4))


# ---- Q5_K

_Q5_K_BYTES = Q5_K.block_bytes
_Q5_K_TOP = 31
_Q5_K_SCALE_TOP = 63


@kernel
def _decode_q5_k(data: Bytes, out: Floats32) -> None:
    """Decode Q5_K: 256 weights in 176 bytes, 5.5 bits each.

        bytes      field
        0 .. 1     d       float16
        2 .. 3     dmin    float16
        4 .. 15    scales  8 scales sc and 8 minimums m of 6 bits (packing.pack_scales)
        16 .. 47   qh      bit 4 of the codes q: bit j of byte i is that of weight 32 * j + i
        48 .. 175  qs      bits 0 .. 3 of the codes: 32 bytes hold 64, the lower halves first (packing.pack)

    The value of weight i = 0 .. 31 in sub-block j = 0 .. 7:

        d * sc[j] * q[32 * j + i] - dmin * m[j]
    """
    for k in range(data.size // _Q5_K_BYTES):
        start = k * _Q5_K_BYTES
        d, dmin = float_at(data, start), float_at(data, start + 2)
        for j in range(8):
            scale = d * scale_at(data, start + 4, 0, j)
            minus_low = dmin * scale_at(data, start + 4, 1, j)
            for i in range(32 * j, 32 * (j + 1), LANES):
                codes = codes_at(data, start + 48, i, 4, 32) | codes_at(data, start + 16, i, 1, 32) << 4
                store(out, k * ELEMS + i, scale * to_float(codes) - minus_low)


@weighted_kernel(Q5_K)
def _quantize_weighted_q5_k(x: FloatTile, weights: FloatTile, words: IntTile) -> None:
    sums = float_tile(8)
    fit = AffineFit(float_tile(8), float_tile(8), float_tile(8), float_tile(8))
    scale_codes, low_codes = int_tile(8), int_tile(8)
    weigh(x, weights, mean_square(x, np.float32(2)), 32, sums)
    fit_sub_blocks(x, weights, 32, _Q5_K_TOP, np.float32(-0.9), np.float32(0.05), 36, fit)
    d = search_positive(fit.scales, sums, scale_codes, 8, _Q5_K_SCALE_TOP)
    dmin = search_positive(fit.minus_lows, sums, low_codes, 8, _Q5_K_SCALE_TOP)
    words[0] = to_half_bits(d) | to_half_bits(dmin) << 16
    _pack_rest_q5_k(x, fit, scale_codes, low_codes, words)


@plain_kernel(Q5_K)
def _quantize_plain_q5_k(x: FloatTile, words: IntTile) -> None:
    weights = float_tile(256)
    fit = AffineFit(float_tile(8), float_tile(8), float_tile(8), float_tile(8))
    scale_codes, low_codes = int_tile(8), int_tile(8)
    weigh_by_magnitude(x, 32, weights)
    fit_sub_blocks(x, weights, 32, _Q5_K_TOP, np.float32(-0.5), np.float32(0.1), 15, fit)
    d = code_by_largest(fit.scales, 8, _Q5_K_SCALE_TOP, scale_codes)
    dmin = code_by_largest(fit.minus_lows, 8, _Q5_K_SCALE_TOP, low_codes)
    words[0] = to_half_bits(d) | to_half_bits(dmin) << 16
    _pack_rest_q5_k(x, fit, scale_codes, low_codes, words)


@inlinable
def _pack_rest_q5_k(
    x: FloatTile, fit: AffineFit, scale_codes: IntTile, low_codes: IntTile, words: IntTile
) -> None:
    """Fill scales, qh and qs of `words`, where d and dmin are set."""
    for j in range(8):
        scale_codes[j] = minimum(scale_codes[j], _Q5_K_SCALE_TOP)
        low_codes[j] = minimum(low_codes[j], _Q5_K_SCALE_TOP)
    pack_scales(scale_codes, low_codes, tail(words, 1))
    codes = int_tile(256)
    codes_as_stored(x, fit, words, _Q5_K_TOP, codes)
    pack(codes, 4, 1, 32, 32, tail(words, 4))
    pack(codes, 0, 4, 32, 128, tail(words, 12))


FORMATS = (
    block_format(Q2_K, _decode_q2_k, _quantize_plain_q2_k, _quantize_weighted_q2_k),
    block_format(Q4_K, _decode_q4_k, _quantize_plain_q4_k, _quantize_weighted_q4_k),
    block_format(Q5_K, _decode_q5_k, _quantize_plain_q5_k, _quantize_weighted_q5_k),
)
