"""Q2_K: 256 weights in 84 bytes, 2.625 bits each.

    bytes     field
    0 .. 15   scales  byte j: scale sc[j] in the lower 4 bits, minimum m[j] in the upper 4
    16 .. 79  qs      codes q of 2 bits: 32 bytes hold 128, the lowest bits first (packing.pack)
    80 .. 81  d       float16
    82 .. 83  dmin    float16

The value of weight i = 0 .. 15 in sub-block j = 0 .. 15:

    d * sc[j] * q[16 * j + i] - dmin * m[j]
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from gguf_tools.format.ggml_types import Q2_K
from quantize.formats.base import Rows, block_dtype, block_format
from quantize.formats.k_quants.super_block import (
    ELEMS,
    AffineFit,
    code_by_largest,
    fit_sub_blocks,
    fit_sub_blocks_absolute,
    mean_square,
    weigh,
)
from quantize.formats.search import affine_codes, search_positive
from quantize.simd.floats import float_at, from_half_bits, to_half_bits
from quantize.simd.kernel import inlinable, kernel
from quantize.simd.lane_memory import FloatTile, IntTile, float_tile, int_tile, store, tail
from quantize.simd.lanes import LANES, absolute, shift_right_logical, to_float
from quantize.simd.packing import codes_at, pack
from quantize.simd.tiles import first_not_finite, load_blocks, load_importances, padded_words, store_blocks

BLOCK = block_dtype(Q2_K)
_BYTES = BLOCK.itemsize
_WORDS = padded_words(_BYTES)
_D_WORD = 20
_TOP = 3
_SCALE_TOP = 15


@kernel
def _decode(data: npt.NDArray[np.uint8], out: npt.NDArray[np.float32]) -> None:
    for k in range(data.size // _BYTES):
        start = k * _BYTES
        d, dmin = float_at(data, start + 80), float_at(data, start + 82)
        for j in range(16):
            packed = data[start + j]
            codes = codes_at(data, start + 16, 16 * j, 2, 32)
            weights = d * np.float32(packed & 0xF) * to_float(codes) - dmin * np.float32(packed >> 4)
            store(out, k * ELEMS + 16 * j, weights)


@kernel
def _quantize_weighted(source: Rows, importances: npt.NDArray[np.float32], out: npt.NDArray[np.uint8]) -> int:
    x, weights, sums = float_tile(256), float_tile(256), float_tile(16)
    fit = AffineFit(float_tile(16), float_tile(16), float_tile(16), float_tile(16))
    scale_codes, low_codes = int_tile(16), int_tile(16)
    words = int_tile(_WORDS)
    for first in range(0, out.size // _BYTES, LANES):
        if not load_blocks(source, first, 256, x):
            return first_not_finite(x, 256, first, out.size // _BYTES)
        load_importances(importances, first, 256, weights)
        weigh(x, weights, mean_square(x, np.float32(1)), 16, sums)
        fit_sub_blocks(x, weights, 16, _TOP, np.float32(-0.9), np.float32(0.05), 36, fit)
        d = search_positive(fit.scales, sums, scale_codes, 16, _SCALE_TOP)
        dmin = search_positive(fit.minus_lows, sums, low_codes, 16, _SCALE_TOP)
        words[_D_WORD] = to_half_bits(d) | to_half_bits(dmin) << 16
        _pack_rest(x, fit, scale_codes, low_codes, words)
        store_blocks(words, out, first, _BYTES)
    return -1


@kernel
def _quantize_plain(source: Rows, out: npt.NDArray[np.uint8]) -> int:
    x, weights = float_tile(256), float_tile(256)
    fit = AffineFit(float_tile(16), float_tile(16), float_tile(16), float_tile(16))
    scale_codes, low_codes = int_tile(16), int_tile(16)
    words = int_tile(_WORDS)
    for first in range(0, out.size // _BYTES, LANES):
        if not load_blocks(source, first, 256, x):
            return first_not_finite(x, 256, first, out.size // _BYTES)
        for i in range(256):
            weights[i] = absolute(x[i])
        fit_sub_blocks_absolute(x, weights, 16, _TOP, np.float32(-0.5), np.float32(0.1), 15, fit)
        d = code_by_largest(fit.scales, 16, _SCALE_TOP, scale_codes)
        dmin = code_by_largest(fit.minus_lows, 16, _SCALE_TOP, low_codes)
        words[_D_WORD] = to_half_bits(d) | to_half_bits(dmin) << 16
        _pack_rest(x, fit, scale_codes, low_codes, words)
        store_blocks(words, out, first, _BYTES)
    return -1


@inlinable
def _pack_rest(
    x: FloatTile, fit: AffineFit, scale_codes: IntTile, low_codes: IntTile, words: IntTile
) -> None:
    """Fill scales and qs of `words`, where d and dmin are set."""
    codes = int_tile(256)
    d = from_half_bits(words[_D_WORD] & 0xFFFF)
    dmin = from_half_bits(shift_right_logical(words[_D_WORD], 16))
    for j in range(16):
        both = scale_codes[j] | low_codes[j] << 4  # a scale code beyond 4 bits spills into the minimum's
        scale_codes[j] = both
        scale = d * to_float(both & 0xF)
        minus_low = dmin * to_float(both >> 4 & 0xF)
        sub, sub_codes = tail(x, 16 * j), tail(codes, 16 * j)
        affine_codes(sub, scale, minus_low, fit.inverses[j], fit.code_lows[j], 16, _TOP, sub_codes)
    pack(scale_codes, 0, 8, 16, 16, words)
    pack(codes, 0, 2, 32, 64, tail(words, 4))


FORMAT = block_format(Q2_K, _decode, _quantize_plain, _quantize_weighted)
