"""Q4_K: 256 weights in 144 bytes, 4.5 bits each.

    bytes      field
    0 .. 1     d       float16
    2 .. 3     dmin    float16
    4 .. 15    scales  8 scales sc and 8 minimums m of 6 bits (packing.pack_scales)
    16 .. 143  qs      codes q of 4 bits: 32 bytes hold 64, the lower halves first (packing.pack)

The value of weight i = 0 .. 31 in sub-block j = 0 .. 7:

    d * sc[j] * q[32 * j + i] - dmin * m[j]
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from gguf_tools.format.ggml_types import Q4_K
from quantize.formats.base import Rows, block_dtype, block_format
from quantize.formats.k_quants.super_block import (
    ELEMS,
    AffineFit,
    code_by_largest,
    codes_as_stored,
    fit_sub_blocks,
    mean_square,
    weigh,
    weigh_by_magnitude,
)
from quantize.formats.search import search_positive
from quantize.simd.floats import float_at, to_half_bits
from quantize.simd.kernel import inlinable, kernel
from quantize.simd.lane_memory import FloatTile, IntTile, float_tile, int_tile, store, tail
from quantize.simd.lanes import LANES, minimum, to_float
from quantize.simd.packing import codes_at, pack, pack_scales, scale_at
from quantize.simd.tiles import first_not_finite, load_blocks, load_importances, padded_words, store_blocks

BLOCK = block_dtype(Q4_K)
_BYTES = BLOCK.itemsize
_WORDS = padded_words(_BYTES)
_TOP = 15
_SCALE_TOP = 63


@kernel
def _decode(data: npt.NDArray[np.uint8], out: npt.NDArray[np.float32]) -> None:
    for k in range(data.size // _BYTES):
        start = k * _BYTES
        d, dmin = float_at(data, start), float_at(data, start + 2)
        for j in range(8):
            scale = d * scale_at(data, start + 4, 0, j)
            minus_low = dmin * scale_at(data, start + 4, 1, j)
            for i in range(32 * j, 32 * (j + 1), LANES):
                codes = codes_at(data, start + 16, i, 4, 32)
                store(out, k * ELEMS + i, scale * to_float(codes) - minus_low)


@kernel
def _quantize_weighted(source: Rows, importances: npt.NDArray[np.float32], out: npt.NDArray[np.uint8]) -> int:
    x, weights, sums = float_tile(256), float_tile(256), float_tile(8)
    fit = AffineFit(float_tile(8), float_tile(8), float_tile(8), float_tile(8))
    scale_codes, low_codes = int_tile(8), int_tile(8)
    words = int_tile(_WORDS)
    for first in range(0, out.size // _BYTES, LANES):
        if not load_blocks(source, first, 256, x):
            return first_not_finite(x, 256, first, out.size // _BYTES)
        load_importances(importances, first, 256, weights)
        weigh(x, weights, mean_square(x, np.float32(2)), 32, sums)
        fit_sub_blocks(x, weights, 32, _TOP, np.float32(-0.9), np.float32(0.05), 36, fit)
        d = search_positive(fit.scales, sums, scale_codes, 8, _SCALE_TOP)
        dmin = search_positive(fit.minus_lows, sums, low_codes, 8, _SCALE_TOP)
        words[0] = to_half_bits(d) | to_half_bits(dmin) << 16
        pack_scales(scale_codes, low_codes, tail(words, 1))
        _pack_codes(x, fit, words)
        store_blocks(words, out, first, _BYTES)
    return -1


@kernel
def _quantize_plain(source: Rows, out: npt.NDArray[np.uint8]) -> int:
    x, weights = float_tile(256), float_tile(256)
    fit = AffineFit(float_tile(8), float_tile(8), float_tile(8), float_tile(8))
    scale_codes, low_codes = int_tile(8), int_tile(8)
    words = int_tile(_WORDS)
    for first in range(0, out.size // _BYTES, LANES):
        if not load_blocks(source, first, 256, x):
            return first_not_finite(x, 256, first, out.size // _BYTES)
        weigh_by_magnitude(x, 32, weights)
        fit_sub_blocks(x, weights, 32, _TOP, np.float32(-1), np.float32(0.1), 20, fit)
        d = code_by_largest(fit.scales, 8, _SCALE_TOP, scale_codes)
        dmin = code_by_largest(fit.minus_lows, 8, _SCALE_TOP, low_codes)
        for j in range(8):
            scale_codes[j] = minimum(scale_codes[j], _SCALE_TOP)
            low_codes[j] = minimum(low_codes[j], _SCALE_TOP)
        words[0] = to_half_bits(d) | to_half_bits(dmin) << 16
        pack_scales(scale_codes, low_codes, tail(words, 1))
        _pack_codes(x, fit, words)
        store_blocks(words, out, first, _BYTES)
    return -1


@inlinable
def _pack_codes(x: FloatTile, fit: AffineFit, words: IntTile) -> None:
    """Fill field qs of `words`, whose other fields are set."""
    codes = int_tile(256)
    codes_as_stored(x, fit, words, _TOP, codes)
    pack(codes, 0, 4, 32, 128, tail(words, 4))


FORMAT = block_format(Q4_K, _decode, _quantize_plain, _quantize_weighted)
