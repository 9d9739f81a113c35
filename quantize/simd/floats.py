"""The float32 numbers that kernels start from, and floats as integers and as bits: `nearest_int`, halves.

A bare literal beside Floats would be a float64, hence the constants.

ggml's nearest_int adds 1.5 * 2**23, where float32 has steps of one, and takes the sum's fraction bits.
Within +-2**22 this rounds to nearest even. Beyond, the bits are those of a coarser number: an infinity
gives -2**22, and the NaN that arithmetic makes gives 0. Searches that divide by a tiny range get there.

Halves are float16 and bfloat16 as bits, where numba has no 16-bit floats. Each compiled function takes lanes
or a scalar. Rounding is to nearest even, subnormals are kept, too large becomes infinity, as in ggml.

    float16    1 sign  5 exponent (bias 15)  10 fraction
    bfloat16   the upper half of a float32
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from quantize.simd.kernel import inlinable
from quantize.simd.lanes import Floats, Ints, bits, from_bits, maximum, minimum, select

ZERO = np.float32(0)
QUARTER = np.float32(0.25)
HALF = np.float32(0.5)
ONE = np.float32(1)
TWO = np.float32(2)
INFINITY = np.float32(np.inf)


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


_REBIAS = np.float32(2.0**112)  # 2**(127 - 15)
_HALF_BITS = 0x3F000000
_LEAST_NORMAL = 0x38800000  # 2**-14, the least normal float16
_INFINITY_BITS = 0x7F800000


@inlinable
def to_half_bits(value: Any) -> Any:
    """Return float32 as float16 bits, 0 .. 0xFFFF in a 32-bit integer. A NaN becomes 0x7E00 with its sign."""
    pattern = bits(value)
    magnitude = pattern & 0x7FFFFFFF
    normal = (magnitude - (112 << 23) + 0xFFF + ((magnitude >> 13) & 1)) >> 13
    # float32 in [0.5, 1) step by 2**-24, float16's subnormals do too: the addition rounds for us
    subnormal = bits(from_bits(magnitude) + HALF) - _HALF_BITS
    half = select(magnitude < _LEAST_NORMAL, subnormal, normal)
    half = select(half > 0x7C00, 0x7C00, half)
    half = select(magnitude > _INFINITY_BITS, 0x7E00, half)
    return ((pattern >> 16) & 0x8000) | half


@inlinable
def from_half_bits(half: Any) -> Any:
    """Return float16 bits, 0 .. 0xFFFF in an integer, as float32; exact. A signalling NaN stays one."""
    moved = (half & 0x7FFF) << 13
    finite = from_bits(moved) * _REBIAS
    special = from_bits(moved | _INFINITY_BITS)
    value = select((half & 0x7C00) == 0x7C00, special, finite)
    return from_bits(bits(value) | ((half & 0x8000) << 16))


@inlinable
def to_bfloat_bits(value: Any) -> Any:
    """Return float32 as bfloat16 bits, 0 .. 0xFFFF in an integer. A NaN keeps its upper bits, made quiet."""
    pattern = bits(value)
    upper = (pattern >> 16) & 0xFFFF
    rounded = ((pattern + 0x7FFF + (upper & 1)) >> 16) & 0xFFFF
    return select((pattern & 0x7FFFFFFF) > _INFINITY_BITS, upper | 0x40, rounded)


@inlinable
def from_bfloat_bits(half: Any) -> Any:
    """Return bfloat16 bits, 0 .. 0xFFFF in an integer, as float32; exact."""
    return from_bits(half << 16)


def halves_to_float32(halves: npt.NDArray[np.uint16]) -> npt.NDArray[np.float32]:
    """Return an array of float16 bits as float32, outside of kernels."""
    return halves.view(np.float16).astype(np.float32)


@inlinable
def float_at(data: npt.NDArray[Any], offset: int) -> np.float32:
    """Return the float16 whose bytes, uint8 or int8, begin at data[offset]."""
    return from_half_bits(data[offset] & 0xFF | (data[offset + 1] & 0xFF) << 8)
