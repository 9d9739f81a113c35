"""What MXFP4 and NVFP4 share: the sixteen values of a 4-bit float.

    code bits   1 sign  2 exponent  1 fraction
    codes 0 .. 7 stand for 0 1 2 3 4 6 8 12 halves, codes 8 .. 15 for the same with a minus sign

Doubled, the values are integers, and so are stored scales read as half of what they say: a weight is
d * doubled value with d = scale / 2.

ggml's best_index_mxfp4 takes the first of the values with the least error: the one nearer to zero of equals,
and 0 never with a minus sign.
"""

from __future__ import annotations

import numpy as np

from quantize.simd.floats import HALF, ZERO
from quantize.simd.kernel import inlinable
from quantize.simd.lane_memory import FloatTile, IntTile, float_tile
from quantize.simd.lanes import Floats, Ints, absolute, from_bits, select, splat, to_float

DOUBLED = np.array([0, 1, 2, 3, 4, 6, 8, 12], np.float32)
"""Twice the values of codes 0 .. 7."""

_SIGN = 8
_ONE_BITS = 0x3F800000


@inlinable
def doubled_values(codes: Ints) -> Floats:
    """Return twice the values of codes 0 .. 15; code 8 gives 0, not -0."""
    size = codes & 7
    # from code 2 on, exponent and fraction are those of a float32 with another bias
    value = select(size < 2, to_float(size), from_bits((size << 22) + _ONE_BITS))
    return select((codes & _SIGN) != 0, ZERO - value, value)


@inlinable
def nearest_codes(x: FloatTile, start: int, count: int, d: Floats, codes: IntTile) -> None:
    """Fill codes[start : start + count] with the nearest to x / d, for d > 0 and x well below 2**24 * d.

    An edge between two values d * a and d * b is computed so that it is exact, and infinite if d * b is.
    """
    edges = float_tile(7)
    edges[0] = HALF * d
    edges[1] = d + HALF * d
    edges[2] = np.float32(2) * d + HALF * d
    edges[3] = np.float32(3) * d + HALF * d
    edges[4] = np.float32(4) * d + d
    edges[5] = np.float32(8) * d - d
    edges[6] = np.float32(12) * d - np.float32(2) * d
    for i in range(start, start + count):
        code = splat(0)
        for k in range(7):
            code = select(absolute(x[i]) > edges[k], k + 1, code)
        codes[i] = select((code != 0) & (x[i] < ZERO), code | _SIGN, code)


@inlinable
def first_best_codes(x: FloatTile, start: int, count: int, d: Floats, codes: IntTile) -> None:
    """Fill codes[start : start + count] as the reference does, for any x and d.

    Far beyond the largest value all errors are rounded to the same number, and 0 is the first of them.
    """
    for i in range(start, start + count):
        magnitude = absolute(x[i])
        best = magnitude
        code = splat(0)
        for k in range(1, 8):
            error = absolute(DOUBLED[k] * d - magnitude)
            better = error < best
            best = select(better, error, best)
            code = select(better, k, code)
        codes[i] = select((code != 0) & (x[i] < ZERO), code | _SIGN, code)
