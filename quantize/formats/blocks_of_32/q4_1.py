"""Q4_1: 32 weights in 20 bytes, 5 bits each.

bytes     field
0 .. 1    d   float16
2 .. 3    m   float16
4 .. 19   qs  codes q of 4 bits: byte i holds q[i] in its lower half and q[i + 16] in the upper

weight[i] = d * q[i] + m
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from gguf_tools.format.ggml_types import Q4_1
from quantize.formats.base import Rows, block_dtype, block_format
from quantize.formats.blocks_of_32.scales import (
    ELEMS,
    add_minimum,
    fit_range,
    load_weighted,
    row_mean_squares,
)
from quantize.formats.search import search_affine
from quantize.simd.floats import clamp, float_at, nearest_int, to_half_bits
from quantize.simd.kernel import inlinable, kernel
from quantize.simd.lane_memory import IntTile, float_tile, int_tile, load, store, tail
from quantize.simd.lanes import LANES, Floats, to_float
from quantize.simd.packing import pack
from quantize.simd.tiles import first_not_finite, load_blocks, padded_words, store_blocks

BLOCK = block_dtype(Q4_1)
_TOP = 15
_BYTES = BLOCK.itemsize
_WORDS = padded_words(_BYTES)


@kernel
def _decode(data: npt.NDArray[np.uint8], out: npt.NDArray[np.float32]) -> None:
    for k in range(data.size // _BYTES):
        start = k * _BYTES
        d = float_at(data, start)
        m = float_at(data, start + 2)
        packed = load(data, start + 4)
        store(out, k * ELEMS, add_minimum(d * to_float(packed & 0xF), m))
        store(out, k * ELEMS + LANES, add_minimum(d * to_float(packed >> 4), m))


@kernel
def _quantize_plain(source: Rows, out: npt.NDArray[np.uint8]) -> int:
    x = float_tile(ELEMS)
    codes, words = int_tile(ELEMS), int_tile(_WORDS)
    for first in range(0, out.size // _BYTES, LANES):
        if not load_blocks(source, first, ELEMS, x):
            return first_not_finite(x, ELEMS, first, out.size // _BYTES)
        d, m = fit_range(x, _TOP, codes)
        _store(d, m, codes, words, out, first)
    return -1


@kernel
def _quantize_weighted(source: Rows, importances: npt.NDArray[np.float32], out: npt.NDArray[np.uint8]) -> int:
    x, weights = float_tile(ELEMS), float_tile(ELEMS)
    codes, words = int_tile(ELEMS), int_tile(_WORDS)
    means = row_mean_squares(source, importances.size)
    for first in range(0, out.size // _BYTES, LANES):
        if not load_weighted(source, importances, means, first, x, weights):
            return first_not_finite(x, ELEMS, first, out.size // _BYTES)
        d, minus_m, inverse, code_m = search_affine(
            x, weights, ELEMS, _TOP, np.float32(-0.9), np.float32(0.05), 36
        )
        for i in range(ELEMS):
            codes[i] = clamp(nearest_int(inverse * (x[i] - code_m)), 0, _TOP)
        _store(d, -minus_m, codes, words, out, first)
    return -1


@inlinable
def _store(
    d: Floats, m: Floats, codes: IntTile, words: IntTile, out: npt.NDArray[np.uint8], first: int
) -> None:
    words[0] = to_half_bits(d) | to_half_bits(m) << 16
    pack(codes, 0, 4, 16, 16, tail(words, 1))
    store_blocks(words, out, first, _BYTES)


FORMAT = block_format(Q4_1, _decode, _quantize_plain, _quantize_weighted)
