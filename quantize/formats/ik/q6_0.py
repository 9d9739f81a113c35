"""Q6_0: 32 weights in 26 bytes, 6.5 bits each.

bytes     field
0 .. 1    d   float16
2 .. 9    qh  the upper 2 of the 6 bits of the codes q: byte i holds those of q[i], q[i + 16], q[i + 8] and
              q[i + 24], lowest bits first
10 .. 25  qs  the other 4: byte i holds those of q[i] in its lower half, of q[i + 16] in the upper

weight[i] = d * (q[i] - 32)

Source: block_q6_0 and dequantize_row_q6_0 of ik_llama.cpp 8337e4c.
"""

from __future__ import annotations

import numpy as np

from gguf_tools.format.ggml_types import Q6_0
from quantize.formats.base import Bytes, Floats32, Rows
from quantize.formats.blocks_of_32.scales import ELEMS
from quantize.formats.ik.levels.scale_search import inverse_of, power_of
from quantize.formats.ik.rows import first_infinite, ik_format
from quantize.formats.search import farthest_from_zero
from quantize.simd.floats import (
    ZERO,
    clamp,
    float_at,
    from_half_bits,
    nearest_float,
    nearest_int,
    to_half_bits,
)
from quantize.simd.kernel import inlinable, kernel
from quantize.simd.lane_memory import FloatTile, float_tile, int_tile, tail
from quantize.simd.lanes import LANES, Floats, select, splat
from quantize.simd.packing import pack, prepend_half
from quantize.simd.tiles import load_blocks, load_importances, padded_words, store_blocks

_BYTES = Q6_0.block_bytes
_WORDS = padded_words(_BYTES)
_HALF = 32

_FACTORS = np.geomspace(0.95, 1.7, 24).astype(np.float32)
"""Scales that are tried, as multiples of the one that gives the largest weight the code 0 or, with the other
sign, 64, which is cut to 63. In ik_llama.cpp they lie between 0.97 and 1.03."""


@kernel
def _decode(data: Bytes, out: Floats32) -> None:
    for k in range(data.size // _BYTES):
        block = data[k * _BYTES : (k + 1) * _BYTES]
        weights = out[k * ELEMS : (k + 1) * ELEMS]
        d = float_at(block, 0)
        for half in range(2):
            for i in range(8):
                upper = block[2 + i] >> 4 * half
                packed = block[10 + 8 * half + i]
                weights[8 * half + i] = d * np.float32((packed & 0xF | (upper & 3) << 4) - 32)
                weights[8 * half + i + 16] = d * np.float32((packed >> 4 | (upper & 12) << 2) - 32)


@kernel
def _quantize(source: Rows, importances: Floats32, out: Bytes) -> int:
    x, weights = float_tile(ELEMS), float_tile(ELEMS)
    codes, upper, words = int_tile(ELEMS), int_tile(16), int_tile(_WORDS)
    for first in range(0, out.size // _BYTES, LANES):
        load_blocks(source, first, ELEMS, x)
        load_importances(importances, first, ELEMS, weights)
        largest, extreme = farthest_from_zero(x, ELEMS)
        power = power_of(largest)
        for i in range(ELEMS):
            x[i] = x[i] * power
        half_d = to_half_bits(_search(x, weights, extreme * power) * inverse_of(power))
        d = from_half_bits(half_d)
        failure = first_infinite(d, first)
        if failure >= 0:
            return failure * ELEMS // importances.size
        scale = d * power
        for i in range(ELEMS):
            code = clamp(nearest_int(x[i] / scale), -_HALF, _HALF - 1) + _HALF
            codes[i] = select(scale == ZERO, _HALF, code)
        for i in range(8):
            for half in range(2):
                low, high = codes[i + 8 * half] >> 4, codes[i + 8 * half + 16] >> 4
                upper[i + 8 * half] = low | high << 2
        pack(upper, 0, 4, 8, 8, words)
        pack(codes, 0, 4, 16, 16, tail(words, 2))
        prepend_half(half_d, words, 6)
        store_blocks(words, out, first, _BYTES)
    return -1


@inlinable
def _sums_of(x: FloatTile, weights: FloatTile, inverse: Floats) -> tuple[Floats, Floats]:
    """Return the sums of importance * code * x and of importance * code**2."""
    sum_lx = splat(ZERO)
    sum_l2 = splat(ZERO)
    for i in range(ELEMS):
        level = nearest_float(inverse * x[i], -_HALF, _HALF - 1)
        weighted = weights[i] * level
        sum_lx += weighted * x[i]
        sum_l2 += weighted * level
    return sum_lx, sum_l2


@inlinable
def _search(x: FloatTile, weights: FloatTile, extreme: Floats) -> Floats:
    """Return the scale with the least error; 0 where all of x is.

    Each candidate is followed by the best scale for its codes, and the winner by that for the codes it makes.
    """
    scale = splat(ZERO)
    best = splat(ZERO)
    for k in range(2 * _FACTORS.size):
        factor = _FACTORS[k >> 1]
        inverse = (np.float32(_HALF) / (factor if k & 1 else -factor)) / extreme
        sum_lx, sum_l2 = _sums_of(x, weights, inverse)
        better = (sum_l2 > ZERO) & (sum_lx * sum_lx > best * sum_l2)
        scale = select(better, sum_lx / sum_l2, scale)
        best = select(better, scale * sum_lx, best)
    for _ in range(2):
        sum_lx, sum_l2 = _sums_of(x, weights, np.float32(1) / scale)
        better = (sum_l2 > ZERO) & (sum_lx * sum_lx > best * sum_l2)
        scale = select(better, sum_lx / sum_l2, scale)
        best = select(better, scale * sum_lx, best)
    return scale


FORMATS = (ik_format(Q6_0, ELEMS, _quantize, _decode),)
