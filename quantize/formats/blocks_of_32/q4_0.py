"""Q4_0: 32 weights in 18 bytes, 4.5 bits each.

bytes     field
0 .. 1    d   float16
2 .. 17   qs  codes q of 4 bits: byte i holds q[i] in its lower half and q[i + 16] in the upper

weight[i] = d * (q[i] - 8)
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from gguf_tools.format.ggml_types import Q4_0
from quantize.formats.base import Rows, block_dtype, block_format
from quantize.formats.blocks_of_32.scales import ELEMS, fit_symmetric, load_weighted, row_mean_squares
from quantize.formats.search import search_symmetric
from quantize.simd.floats import ZERO, clamp, float_at, nearest_int, to_half_bits
from quantize.simd.kernel import inlinable, kernel
from quantize.simd.lane_memory import IntTile, float_tile, int_tile, load, store
from quantize.simd.lanes import LANES, Floats, select, to_float
from quantize.simd.packing import pack, prepend_half
from quantize.simd.tiles import first_not_finite, load_blocks, padded_words, store_blocks

BLOCK = block_dtype(Q4_0)
_HALF = 8
_BYTES = BLOCK.itemsize
_WORDS = padded_words(_BYTES)


@kernel
def _decode(data: npt.NDArray[np.uint8], out: npt.NDArray[np.float32]) -> None:
    for k in range(data.size // _BYTES):
        start = k * _BYTES
        d = float_at(data, start)
        packed = load(data, start + 2)
        store(out, k * ELEMS, d * to_float((packed & 0xF) - _HALF))
        store(out, k * ELEMS + LANES, d * to_float((packed >> 4) - _HALF))


@kernel
def _quantize_plain(source: Rows, out: npt.NDArray[np.uint8]) -> int:
    x = float_tile(ELEMS)
    codes, words = int_tile(ELEMS), int_tile(_WORDS)
    for first in range(0, out.size // _BYTES, LANES):
        if not load_blocks(source, first, ELEMS, x):
            return first_not_finite(x, ELEMS, first, out.size // _BYTES)
        d = fit_symmetric(x, _HALF, codes)
        _store(d, codes, words, out, first)
    return -1


@kernel
def _quantize_weighted(source: Rows, importances: npt.NDArray[np.float32], out: npt.NDArray[np.uint8]) -> int:
    x, weights = float_tile(ELEMS), float_tile(ELEMS)
    codes, words = int_tile(ELEMS), int_tile(_WORDS)
    means = row_mean_squares(source, importances.size)
    for first in range(0, out.size // _BYTES, LANES):
        if not load_weighted(source, importances, means, first, x, weights):
            return first_not_finite(x, ELEMS, first, out.size // _BYTES)
        d, inverse = search_symmetric(x, weights, ELEMS, _HALF)
        for i in range(ELEMS):
            code = clamp(nearest_int(inverse * x[i]), -_HALF, _HALF - 1) + _HALF
            codes[i] = select(inverse == ZERO, 0, code)
        _store(d, codes, words, out, first)
    return -1


@inlinable
def _store(d: Floats, codes: IntTile, words: IntTile, out: npt.NDArray[np.uint8], first: int) -> None:
    pack(codes, 0, 4, 16, 16, words)
    prepend_half(to_half_bits(d), words, 4)
    store_blocks(words, out, first, _BYTES)


FORMAT = block_format(Q4_0, _decode, _quantize_plain, _quantize_weighted)
