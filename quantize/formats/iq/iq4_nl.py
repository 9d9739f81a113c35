"""IQ4_NL: 32 weights in 18 bytes, 4.5 bits each, on levels that lie closer together near zero.

bytes     field
0 .. 1    d   float16
2 .. 17   qs  codes q of 4 bits: byte i holds q[i] in its lower half and q[i + 16] in the upper

weight[i] = d * level[q[i]], the sixteen levels being

    -127 -104 -83 -65 -49 -35 -22 -10 1 13 25 38 53 69 89 113
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from gguf_tools.format.ggml_types import IQ4_NL
from quantize.formats.base import Rows, block_dtype, block_format
from quantize.formats.blocks_of_32.scales import ELEMS
from quantize.formats.iq.iq4 import levels_of, nearest_code, search_levels
from quantize.simd.floats import ONE, ZERO, float_at, to_half_bits
from quantize.simd.kernel import inlinable, kernel
from quantize.simd.lane_memory import FloatTile, IntTile, float_tile, int_tile, load, store
from quantize.simd.lanes import LANES, Floats, select, splat, square_root
from quantize.simd.packing import pack, prepend_half
from quantize.simd.tiles import first_not_finite, load_blocks, load_importances, padded_words, store_blocks

BLOCK = block_dtype(IQ4_NL)
_BYTES = BLOCK.itemsize
_WORDS = padded_words(_BYTES)
_TWICE_MEAN = np.float32(2 / ELEMS)


@kernel
def _decode(data: npt.NDArray[np.uint8], out: npt.NDArray[np.float32]) -> None:
    for k in range(data.size // _BYTES):
        start = k * _BYTES
        d = float_at(data, start)
        packed = load(data, start + 2)
        store(out, k * ELEMS, d * levels_of(packed & 0xF))
        store(out, k * ELEMS + LANES, d * levels_of(packed >> 4))


@kernel
def _quantize_plain(source: Rows, out: npt.NDArray[np.uint8]) -> int:
    x, weights = float_tile(ELEMS), float_tile(ELEMS)
    words = int_tile(_WORDS)
    for first in range(0, out.size // _BYTES, LANES):
        if not load_blocks(source, first, ELEMS, x):
            return first_not_finite(x, ELEMS, first, out.size // _BYTES)
        for i in range(ELEMS):
            weights[i] = x[i] * x[i]
        _encode(x, search_levels(x, weights), words)
        store_blocks(words, out, first, _BYTES)
    return -1


@kernel
def _quantize_weighted(source: Rows, importances: npt.NDArray[np.float32], out: npt.NDArray[np.uint8]) -> int:
    x, weights = float_tile(ELEMS), float_tile(ELEMS)
    words = int_tile(_WORDS)
    for first in range(0, out.size // _BYTES, LANES):
        if not load_blocks(source, first, ELEMS, x):
            return first_not_finite(x, ELEMS, first, out.size // _BYTES)
        load_importances(importances, first, ELEMS, weights)
        total = splat(ZERO)
        for i in range(ELEMS):
            total += x[i] * x[i]
        spread = _TWICE_MEAN * total
        for i in range(ELEMS):
            weights[i] = weights[i] * square_root(spread + x[i] * x[i])
        _encode(x, search_levels(x, weights), words)
        store_blocks(words, out, first, _BYTES)
    return -1


@inlinable
def _encode(x: FloatTile, d: Floats, words: IntTile) -> None:
    """Fill `words`."""
    codes = int_tile(ELEMS)
    inverse = select(d != ZERO, ONE / d, ZERO)
    for i in range(ELEMS):
        codes[i] = nearest_code(inverse * x[i])
    pack(codes, 0, 4, 16, 16, words)
    prepend_half(to_half_bits(d), words, 4)


FORMAT = block_format(IQ4_NL, _decode, _quantize_plain, _quantize_weighted)
