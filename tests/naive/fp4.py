"""Twins of the formats with 4-bit floats: MXFP4 and NVFP4.

Block layouts, in bytes:

  MXFP4  e | 16 bytes codes               x = 2**(e - 127) * value[code]
  NVFP4  4 scales | 4 times 8 bytes codes   x = scale * value[code], 16 values a scale

The values 0 0.5 1 1.5 2 3 4 6 are taken twice as large, and the scales half as large, as the reference does.
Of n values, byte i of n / 2 has value i in its low half and value i + n / 2 in its high half.
"""

from __future__ import annotations

import math

import numpy as np

from tests.naive.blocks_of_32 import Bytes, Row, decode, split_nibbles
from tests.naive.floats import bits, f32, truncate
from tests.naive.searches import largest_magnitude

VALUES = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


def first_best_code(x: f32, d: f32) -> int:
    """Return the first of the codes whose value times d is nearest to `x`."""
    errors = [abs(value * d - x) for value in VALUES]
    return errors.index(min(errors))


def nibble_pairs(codes: list[int]) -> Bytes:
    half = len(codes) // 2
    return np.array([codes[i] | codes[i + half] << 4 for i in range(half)], np.uint8)


def power_of_two(exponent: int) -> f32:
    """Return 2**exponent, exact from -149 to 127."""
    return f32(math.ldexp(1.0, exponent))


def quantize_mxfp4(row: Row, _importances: Row | None) -> Bytes:
    parts = []
    with np.errstate(all="ignore"):
        for start in range(0, len(row), 32):
            x = row[start : start + 32]
            peak = abs(largest_magnitude(x))
            # the logarithm is rounded to float32 first: just below a power of two it gives that power
            e = math.floor(f32(math.log2(peak))) - 2 + 127 & 0xFF if peak > 0 else 0
            codes = [first_best_code(value, power_of_two(e - 128)) for value in x]
            parts += [np.array([e], np.uint8), nibble_pairs(codes)]
    return np.concatenate(parts)


def dequantize_mxfp4(data: Bytes) -> Row:
    def block(b: Bytes) -> list[f32]:
        d = power_of_two(int(b[0]) - 128)
        return [VALUES[code] * d for code in split_nibbles(b[1:])]

    return decode(data, 17, block)


def to_ue4m3(x: f32) -> int:
    """Return the 4 bits of exponent and 3 of fraction of `x`, rounded half up; 448 from 256 on.

    Below 2**-6 it is a number of 2**-9, 7 at most.
    """
    if not x > 0:
        return 0
    if x < f32(2**-6):
        return min(truncate(x * 512 + f32(0.5)), 7)
    rounded = (bits(x) + (1 << 19) >> 20) - (120 << 3)
    return min(rounded, 0x7E) if rounded < 15 << 3 else 0x7E


def half_of_ue4m3(byte: int) -> f32:
    exponent, fraction = byte >> 3 & 0xF, byte & 7
    if byte == 0x7F:
        return f32(0)
    if exponent == 0:
        return f32(fraction * 2**-10)
    return f32((8 + fraction) * 2.0 ** (exponent - 11))


def quantize_nvfp4(row: Row, _importances: Row | None) -> Bytes:
    parts = []
    with np.errstate(all="ignore"):
        for start in range(0, len(row), 64):
            groups = row[start : start + 64].reshape(4, 16)
            scales = [to_ue4m3(abs(largest_magnitude(x)) / 6) for x in groups]
            parts.append(np.array(scales, np.uint8))
            for x, scale in zip(groups, scales, strict=True):
                parts.append(nibble_pairs([first_best_code(value, half_of_ue4m3(scale)) for value in x]))
    return np.concatenate(parts)


def dequantize_nvfp4(data: Bytes) -> Row:
    def block(b: Bytes) -> list[f32]:
        values = []
        for j in range(4):
            d = half_of_ue4m3(int(b[j]))
            values += [VALUES[code] * d for code in split_nibbles(b[4 + 8 * j : 12 + 8 * j])]
        return values

    return decode(data, 36, block)
