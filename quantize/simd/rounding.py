"""Rounding of lanes to integers as the reference does it, also beyond the range where it is right.

ggml's nearest_int adds 1.5 * 2**23, where float32 has steps of one, and takes the sum's fraction bits.
Within +-2**22 this rounds to nearest even. Beyond, the bits are those of a coarser number: an infinity
gives -2**22, and the NaN that arithmetic makes gives 0. Searches that divide by a tiny range get there.
"""

from __future__ import annotations

import numpy as np

from quantize.simd.kernel import inlinable
from quantize.simd.lanes import Floats, Ints, bits, from_bits, maximum, minimum

IN_RANGE = np.float32(2.0**22)

MAGIC = np.float32(1.5 * 2**23)
"""The number that leaves the nearest integer when it is added and then subtracted."""

_MAGIC_BITS = int(MAGIC.view(np.int32))
_FRACTION = 0x007FFFFF
_ZERO = 0x00400000


@inlinable
def nearest_int(value: Floats) -> Ints:
    """Return any Floats as the Ints that ggml's nearest_int gives."""
    return (bits(value + MAGIC) & _FRACTION) - _ZERO


@inlinable
def clamp(value: Ints, low: int, high: int) -> Ints:
    """Return Ints limited to low .. high."""
    return maximum(minimum(value, high), low)


@inlinable
def nearest_float(value: Floats, low: int, high: int) -> Floats:
    """Return Floats, all within +-IN_RANGE, rounded to nearest even and limited to low .. high.

    The same as to_float(clamp(nearest_int(value), low, high)) in two thirds of the instructions: the sum
    with the magic number is limited as an integer, and taking the magic number off again gives a float.
    """
    return from_bits(clamp(bits(value + MAGIC), _MAGIC_BITS + low, _MAGIC_BITS + high)) - MAGIC
