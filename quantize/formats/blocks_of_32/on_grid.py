"""Q4_0 for weights that are whole numbers times a scale: the codes are found, whatever the largest one is.

The reference takes the weight of largest magnitude for -8 scales. Weights on a grid rarely have a -8 in every
block, so all their codes are rounded anew. Here each code from 8 to 1 is tried for the largest weight, and
the scale of least error, as a float16, is kept. Where one of them meets every weight, the block is exact.

A checkpoint that was rounded to bfloat16 holds each product of scale and code with an error of its own. So
every scale is tried once more as the least squares of the weights over its codes, which averages them.
"""

from __future__ import annotations

import numpy as np

from gguf_tools.format.ggml_types import Q4_0
from quantize.formats.base import Bytes, Rows, encode_blocks
from quantize.formats.blocks_of_32.q4_q5 import Q4_0_BYTES, Q4_0_HALF, Q4_0_WORDS, store_q4_0
from quantize.formats.blocks_of_32.scales import ELEMS
from quantize.simd.floats import (
    INFINITY,
    ONE,
    ZERO,
    from_half_bits,
    nearest_float,
    nearest_int,
    to_half_bits,
)
from quantize.simd.kernel import inlinable, kernel
from quantize.simd.lane_memory import FloatTile, float_tile, int_tile
from quantize.simd.lanes import LANES, Floats, absolute, any_lane, select, splat
from quantize.simd.tiles import first_not_finite, load_blocks


def encode_on_grid(rows: Rows) -> Bytes:
    """Encode rows as Q4_0 with the scales of least squared error, uint8 (n_rows, row bytes).

    rows    (n_rows, n_cols) of ROW_DTYPES
    raises  ShapeError for rows that are no whole blocks, BlockRefused for a NaN or infinity
    """
    return encode_blocks(rows, None, Q4_0, _quantize)


@kernel
def _quantize(source: Rows, out: Bytes) -> int:
    x = float_tile(ELEMS)
    codes, words = int_tile(ELEMS), int_tile(Q4_0_WORDS)
    for first in range(0, out.size // Q4_0_BYTES, LANES):
        if not load_blocks(source, first, ELEMS, x):
            return first_not_finite(x, ELEMS, first, out.size // Q4_0_BYTES)
        d = _scale(x)
        inverse = _inverse(d)
        for i in range(ELEMS):
            codes[i] = nearest_int(nearest_float(x[i] * inverse, -Q4_0_HALF, Q4_0_HALF - 1)) + Q4_0_HALF
        store_q4_0(d, codes, words, out, first)
    return -1


@inlinable
def _scale(x: FloatTile) -> Floats:
    """Return the scale of least squared error, a float16."""
    largest, extreme = splat(ZERO), splat(ZERO)
    for i in range(ELEMS):
        farther = absolute(x[i]) > largest
        largest = select(farther, absolute(x[i]), largest)
        extreme = select(farther, x[i], extreme)
    best, least = splat(ZERO), splat(INFINITY)
    for code in range(Q4_0_HALF, 0, -1):
        # only -8 is a code, so a largest weight of 8 scales decides the sign
        d = extreme / np.float32(-code) if code == Q4_0_HALF else largest / np.float32(code)
        for _ in range(2):
            d = from_half_bits(to_half_bits(d))
            cost, better = _try(x, d)
            is_less = cost < least
            best, least = select(is_less, d, best), select(is_less, cost, least)
            d = better
        if not any_lane(least > ZERO):
            break
    return best


@inlinable
def _try(x: FloatTile, d: Floats) -> tuple[Floats, Floats]:
    """Return the squared error of a block at a scale, and the scale of least error for the same codes."""
    inverse = _inverse(d)
    cost, products, squares = splat(ZERO), splat(ZERO), splat(ZERO)
    for i in range(ELEMS):
        code = nearest_float(x[i] * inverse, -Q4_0_HALF, Q4_0_HALF - 1)
        error = x[i] - d * code
        cost = cost + error * error
        products = products + x[i] * code
        squares = squares + code * code
    return cost, select(squares == ZERO, ZERO, products / squares)


@inlinable
def _inverse(d: Floats) -> Floats:
    return select(d == ZERO, ZERO, ONE / d)
