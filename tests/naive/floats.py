"""Scalar conversions as the reference does them on x86-64 without any extension.

All arithmetic on `f32` scalars here and beside here is float32: numpy keeps the type when the other
operand is a Python number, and rounds once per operation.
"""

from __future__ import annotations

import numpy as np

f32 = np.float32

INT32_MIN = -(2**31)


def bits(x: f32) -> int:
    """Return the 32 bits of a float32."""
    return int(f32(x).view(np.uint32))


def from_bits(word: int) -> f32:
    return np.uint32(word & 0xFFFFFFFF).view(f32)


def to_half(x: f32) -> int:
    """Return the bits of `x` as a half: nearest, ties to even; a NaN becomes 0x7E00 with its sign."""
    if np.isnan(x):
        return (bits(x) >> 16) & 0x8000 | 0x7E00
    with np.errstate(over="ignore"):
        return int(np.float16(x).view(np.uint16))


def from_half(half: int) -> f32:
    """Return the value of a half; a signalling NaN becomes quiet."""
    half = int(half)
    if half & 0x7C00 == 0x7C00 and half & 0x3FF:
        return from_bits((half & 0x8000) << 16 | 0x7FC00000 | (half & 0x3FF) << 13)
    return f32(np.uint16(half).view(np.float16))


def to_bfloat16(x: f32) -> int:
    """Return the bits of `x` as a bfloat16: nearest, ties to even; a NaN keeps its upper bits, made quiet."""
    word = bits(x)
    if np.isnan(x):
        return word >> 16 | 0x40
    return word + 0x7FFF + (word >> 16 & 1) >> 16


def from_bfloat16(word: int) -> f32:
    return from_bits(int(word) << 16)


def nearest(x: f32) -> int:
    """Return the integer nearest to `x`, ties to even, for |x| < 2**22.

    Adding 1.5 * 2**23 pushes the fraction out and leaves the integer in the mantissa. Beyond that range
    the same bits are read all the same: NaN gives 0 and infinity gives -2**22.
    """
    return (bits(x + f32(12582912)) & 0x7FFFFF) - 0x400000


def truncate(x: f32) -> int:
    """Return `x` rounded towards zero as an int32; what doesn't fit, and NaN, is -2**31."""
    if np.isnan(x) or not -(2.0**31) <= float(x) < 2.0**31:
        return INT32_MIN
    return int(x)


def as_int8(x: int) -> int:
    """Return the low 8 bits of `x` as a signed number."""
    return (x + 128 & 0xFF) - 128


def round_half_away(x: f32) -> f32:
    """Return `x` rounded to the nearest integer, ties away from zero."""
    if not np.isfinite(x):
        return x
    whole = np.trunc(x)
    return whole + np.copysign(f32(1), x) if abs(x - whole) >= f32(0.5) else whole


def clamp(x: int, low: int, high: int) -> int:
    return max(low, min(high, x))
