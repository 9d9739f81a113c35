"""Q4_0 and Q4_1 for weights that are whole numbers times a scale: the codes are found, whichever there are.

The reference takes the weight of largest magnitude for -8 scales. Weights on a grid rarely have a -8 in every
block, so all their codes are rounded anew. Here each code from 8 to 1 is tried for the largest weight, and
the scale of least error, as a float16, is kept. Where one of them meets every weight, the block is exact.

A checkpoint that was rounded to bfloat16 holds each product of scale and code with an error of its own. So
every scale is tried once more as the least squares of the weights over its codes, which averages them.

Q4_1 is for codes with a zero point. Its reference takes the range of a block for 15 scales. Here the range is
every number of scales from 15 to 1. The minimum, a product of scale and zero point, has to be a float16, too,
and is one to 11 bits.
"""

from __future__ import annotations

import numpy as np

from gguf_tools.format.ggml_types import Q4_0, Q4_1, GGMLType
from quantize.formats.base import Bytes, Rows, encode_blocks
from quantize.formats.block_kernels import plain_kernel
from quantize.formats.blocks_of_32.q4_q5 import (
    Q4_0_HALF,
    Q4_1_TOP,
    pack_q4_0,
    pack_q4_1,
)
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
from quantize.simd.kernel import inlinable
from quantize.simd.lane_memory import FloatTile, IntTile, int_tile
from quantize.simd.lanes import Floats, absolute, any_lane, maximum, minimum, select, splat


def encode_on_grid(rows: Rows, type_: GGMLType) -> Bytes:
    """Encode rows with the scales of least squared error, uint8 (n_rows, row bytes).

    rows    (n_rows, n_cols) of ROW_DTYPES
    type_   one of ON_GRID
    raises  ShapeError for rows that are no whole blocks, BlockRefused for a NaN or infinity
    """
    return encode_blocks(rows, None, type_, ON_GRID[type_])


@plain_kernel(Q4_0)
def _quantize_q4_0(x: FloatTile, words: IntTile) -> None:
    codes = int_tile(ELEMS)
    d = _scale(x)
    inverse = _inverse(d)
    for i in range(ELEMS):
        codes[i] = nearest_int(nearest_float(x[i] * inverse, -Q4_0_HALF, Q4_0_HALF - 1)) + Q4_0_HALF
    pack_q4_0(d, codes, words)


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


@plain_kernel(Q4_1)
def _quantize_q4_1(x: FloatTile, words: IntTile) -> None:
    codes = int_tile(ELEMS)
    low, high = x[0], x[0]
    for i in range(1, ELEMS):
        low, high = minimum(x[i], low), maximum(x[i], high)
    m = from_half_bits(to_half_bits(low))
    d, least = splat(ZERO), splat(INFINITY)
    for n_steps in range(Q4_1_TOP, 0, -1):
        tried = from_half_bits(to_half_bits((high - low) / np.float32(n_steps)))
        cost = _range_cost(x, tried, m)
        d, least = select(cost < least, tried, d), minimum(cost, least)
    inverse = _inverse(d)
    for i in range(ELEMS):
        codes[i] = nearest_int(nearest_float((x[i] - m) * inverse, 0, Q4_1_TOP))
    pack_q4_1(d, m, codes, words)


@inlinable
def _range_cost(x: FloatTile, d: Floats, m: Floats) -> Floats:
    """Return the squared error of a block at a scale and a minimum."""
    inverse, cost = _inverse(d), splat(ZERO)
    for i in range(ELEMS):
        error = x[i] - (m + d * nearest_float((x[i] - m) * inverse, 0, Q4_1_TOP))
        cost = cost + error * error
    return cost


@inlinable
def _inverse(d: Floats) -> Floats:
    return select(d == ZERO, ZERO, ONE / d)


ON_GRID = {Q4_0: _quantize_q4_0, Q4_1: _quantize_q4_1}
"""Types that can keep a grid, and what encodes them."""
