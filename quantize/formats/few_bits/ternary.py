"""What TQ1_0 and TQ2_0 share: 256 weights as -1, 0 or 1 times the largest magnitude."""

from __future__ import annotations

import numpy as np

from quantize.simd.half import to_half_bits
from quantize.simd.kernel import inlinable
from quantize.simd.lane_memory import FloatTile, IntTile
from quantize.simd.lanes import Ints, absolute, maximum, select, splat

ELEMS = 256

_ZERO = np.float32(0)
_ONE = np.float32(1)
_HALF = np.float32(0.5)
_INFINITY = np.float32(np.inf)


@inlinable
def ternary_codes(x: FloatTile, codes: IntTile) -> Ints:
    """Fill 256 codes, 0 .. 2, and return the bits of d; a half of d and more counts as d.

    Where 1 / d overflows, the reference converts infinities and NaN to integers and gets code 1.
    """
    d = splat(_ZERO)
    for i in range(ELEMS):
        d = maximum(d, absolute(x[i]))
    inverse = _ONE / d
    inverse = select(inverse == _INFINITY, _ZERO, inverse)
    for i in range(ELEMS):
        scaled = x[i] * inverse
        code = select(scaled >= _HALF, splat(2), 1)
        codes[i] = select(scaled <= -_HALF, 0, code)
    return to_half_bits(d)
