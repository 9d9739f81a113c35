"""Q6_K: 256 weights in 210 bytes, 6.5625 bits each.

    bytes       field
    0 .. 127    ql      bits 0 .. 3 of the codes q: 64 bytes hold 128, the lower halves first (packing.pack)
    128 .. 191  qh      bits 4 .. 5 of the codes: 32 bytes hold 128, the lowest bits first
    192 .. 207  scales  int8, sc[j] of sub-block j
    208 .. 209  d       float16

The value of weight i = 0 .. 15 in sub-block j = 0 .. 15:

    d * sc[j] * (q[16 * j + i] - 32)
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from gguf_tools.format.ggml_types import Q6_K
from quantize.formats.base import Rows, block_dtype, block_format
from quantize.formats.k_quants.super_block import ELEMS, fit_symmetric_sub_blocks
from quantize.formats.search import EMPTY, farthest_from_zero, symmetric_codes
from quantize.simd.floats import ONE, float_at, from_half_bits, nearest_int, to_half_bits
from quantize.simd.kernel import inlinable, kernel
from quantize.simd.lane_memory import FloatTile, IntTile, float_tile, int_tile, store, tail
from quantize.simd.lanes import LANES, any_lane, minimum, select, splat, to_float
from quantize.simd.packing import codes_at, pack
from quantize.simd.tiles import first_not_finite, load_blocks, load_importances, padded_words, store_blocks

BLOCK = block_dtype(Q6_K)
_BYTES = BLOCK.itemsize
_WORDS = padded_words(_BYTES)
_HALF = 32


@kernel
def _decode(data: npt.NDArray[np.uint8], out: npt.NDArray[np.float32]) -> None:
    for k in range(data.size // _BYTES):
        start = k * _BYTES
        d = float_at(data, start + 208)
        for j in range(16):
            scale = d * np.float32((data[start + 192 + j] ^ 0x80) - 0x80)
            codes = codes_at(data, start, 16 * j, 4, 64) | codes_at(data, start + 128, 16 * j, 2, 32) << 4
            store(out, k * ELEMS + 16 * j, scale * to_float(codes - _HALF))


@kernel
def _quantize_weighted(source: Rows, importances: npt.NDArray[np.float32], out: npt.NDArray[np.uint8]) -> int:
    x, weights = float_tile(256), float_tile(256)
    words = int_tile(_WORDS)
    for first in range(0, out.size // _BYTES, LANES):
        if not load_blocks(source, first, 256, x):
            return first_not_finite(x, 256, first, out.size // _BYTES)
        load_importances(importances, first, 256, weights)
        _encode(x, weights, words)
        store_blocks(words, out, first, _BYTES)
    return -1


@kernel
def _quantize_plain(source: Rows, out: npt.NDArray[np.uint8]) -> int:
    x, weights = float_tile(256), float_tile(256)
    words = int_tile(_WORDS)
    for first in range(0, out.size // _BYTES, LANES):
        if not load_blocks(source, first, 256, x):
            return first_not_finite(x, 256, first, out.size // _BYTES)
        for i in range(256):
            weights[i] = x[i] * x[i]
        _encode(x, weights, words)
        store_blocks(words, out, first, _BYTES)
    return -1


@inlinable
def _encode(x: FloatTile, weights: FloatTile, words: IntTile) -> None:
    """Fill `words`."""
    scales, inverses = float_tile(16), float_tile(16)
    scale_codes, codes = int_tile(16), int_tile(256)
    fit_symmetric_sub_blocks(x, weights, _HALF, scales, inverses)
    largest, extreme = farthest_from_zero(scales, 16)
    inverse_d = np.float32(-128) / extreme
    half_d = to_half_bits(ONE / inverse_d)
    d = from_half_bits(half_d)
    for j in range(16):
        code = minimum(nearest_int(inverse_d * scales[j]), 127) << 24 >> 24
        scale_codes[j] = code
        symmetric_codes(tail(x, 16 * j), d * to_float(code), inverses[j], 16, _HALF, tail(codes, 16 * j))
    pack(codes, 0, 4, 64, 128, words)
    pack(codes, 4, 2, 32, 64, tail(words, 32))
    pack(scale_codes, 0, 8, 16, 16, tail(words, 48))
    words[52] = half_d
    empty = largest < EMPTY
    if any_lane(empty):
        for k in range(53):
            words[k] = select(empty, splat(0), words[k])


FORMAT = block_format(Q6_K, _decode, _quantize_plain, _quantize_weighted)
