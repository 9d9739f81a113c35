"""Twins of the formats whose codes follow from one scale at once: TQ1_0, TQ2_0, Q1_0, Q2_0, Q8_K.

Block layouts, in bytes:

  TQ1_0  48 bytes of 5 codes | 4 bytes of 4 codes | d half    x = d * (code - 1)
  TQ2_0  64 bytes of 4 codes | d half                         x = d * (code - 1)
  Q1_0   d half | 16 bytes of 8 codes                         x = d or -d
  Q2_0   d half | 16 bytes of 4 codes                         x = d * (code - 1)
  Q8_K   d float32 | 256 signed bytes | 16 sums, int16        x = d * code
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tests.naive.blocks_of_32 import Bytes, Row, decode, half_at, half_bytes
from tests.naive.floats import as_int8, bits, f32, from_bits, nearest, round_half_away
from tests.naive.searches import largest_magnitude, total

POWERS_OF_3 = (1, 3, 9, 27, 81)


def encode(row: Row, n_elems: int, block: Callable[[Row], list[Bytes]]) -> Bytes:
    with np.errstate(all="ignore"):
        starts = range(0, len(row), n_elems)
        return np.concatenate([part for start in starts for part in block(row[start : start + n_elems])])


def sign_codes(x: Row, outside: int) -> tuple[f32, list[int]]:
    """Return d and the codes 0 .. 2 of x / d, rounded, ties away from zero.

    outside  the code of an infinity or a NaN, which x / d is where 1 / d overflows
    """
    d = abs(largest_magnitude(x))
    inverse = 1 / d if d > 0 else f32(0)
    scaled = [value * inverse for value in x]
    return d, [int(round_half_away(s)) + 1 if np.isfinite(s) else outside for s in scaled]


# ---- TQ1_0: byte i of a group has codes i, i + size, i + 2 * size ... as digits to the base 3

GROUPS = ((0, 32, 5), (160, 16, 5), (240, 4, 4))
"""Of each group of bytes: first value, bytes, digits a byte."""


def quantize_tq1_0(row: Row, _importances: Row | None) -> Bytes:
    def block(x: Row) -> list[Bytes]:
        d, codes = sign_codes(x, outside=1)
        packed = []
        for first, size, n_digits in GROUPS:
            for i in range(size):
                digits = [codes[first + i + n * size] for n in range(n_digits)]
                number = sum(digit * 3 ** (4 - n) for n, digit in enumerate(digits))
                packed.append(-(-number * 256 // 243))
        return [np.array(packed, np.uint8), half_bytes(d)]

    return encode(row, 256, block)


def dequantize_tq1_0(data: Bytes) -> Row:
    def block(b: Bytes) -> list[f32]:
        values, start = [], 0
        for _first, size, n_digits in GROUPS:
            for n in range(n_digits):
                for byte in b[start : start + size]:
                    code = (int(byte) * POWERS_OF_3[n] & 0xFF) * 3 >> 8
                    values.append((code - 1) * half_at(b, 52))
            start += size
        return values

    return decode(data, 54, block)


# ---- TQ2_0: 32 bytes have 128 codes, byte i those of i, i + 32, i + 64 and i + 96


def quantize_tq2_0(row: Row, _importances: Row | None) -> Bytes:
    def block(x: Row) -> list[Bytes]:
        d, codes = sign_codes(x, outside=1)
        firsts = [half + i for half in (0, 128) for i in range(32)]
        packed = [sum(codes[first + 32 * n] << 2 * n for n in range(4)) for first in firsts]
        return [np.array(packed, np.uint8), half_bytes(d)]

    return encode(row, 256, block)


def dequantize_tq2_0(data: Bytes) -> Row:
    def block(b: Bytes) -> list[f32]:
        codes = [int(b[first + i]) >> 2 * n & 3 for first in (0, 32) for n in range(4) for i in range(32)]
        return [(code - 1) * half_at(b, 64) for code in codes]

    return decode(data, 66, block)


# ---- Q1_0 and Q2_0: codes in order, the first in the lowest bits


def pack_in_order(codes: list[int], width: int) -> Bytes:
    per_byte = 8 // width
    return np.array(
        [
            sum(code << width * n for n, code in enumerate(codes[i : i + per_byte]))
            for i in range(0, len(codes), per_byte)
        ],
        np.uint8,
    )


def unpack_in_order(data: Bytes, width: int) -> list[int]:
    return [int(byte) >> shift & (1 << width) - 1 for byte in data for shift in range(0, 8, width)]


def quantize_q1_0(row: Row, _importances: Row | None) -> Bytes:
    def block(x: Row) -> list[Bytes]:
        d = total([abs(value) for value in x]) / 128
        return [half_bytes(d), pack_in_order([int(value >= 0) for value in x], 1)]

    return encode(row, 128, block)


def dequantize_q1_0(data: Bytes) -> Row:
    def block(b: Bytes) -> list[f32]:
        d = half_at(b, 0)
        minus_d = from_bits(bits(d) ^ 0x80000000)  # also of a NaN
        return [d if code else minus_d for code in unpack_in_order(b[2:], 1)]

    return decode(data, 18, block)


def quantize_q2_0(row: Row, _importances: Row | None) -> Bytes:
    def block(x: Row) -> list[Bytes]:
        d, codes = sign_codes(x, outside=0)
        return [half_bytes(d), pack_in_order(codes, 2)]

    return encode(row, 64, block)


def dequantize_q2_0(data: Bytes) -> Row:
    return decode(data, 18, lambda b: [(code - 1) * half_at(b, 0) for code in unpack_in_order(b[2:], 2)])


# ---- Q8_K


def quantize_q8_k(row: Row, _importances: Row | None) -> Bytes:
    def block(x: Row) -> list[Bytes]:
        peak = largest_magnitude(x)
        inverse = f32(-127) / peak if peak != 0 else f32(0)
        d = 1 / inverse if peak != 0 else f32(0)
        codes = np.array([as_int8(min(127, nearest(inverse * value))) for value in x], np.int8)
        sums = codes.reshape(16, 16).sum(axis=1, dtype=np.int16)
        return [np.array([d], "<f4").view(np.uint8), codes.view(np.uint8), sums.view(np.uint8)]

    return encode(row, 256, block)


def dequantize_q8_k(data: Bytes) -> Row:
    return decode(data, 292, lambda b: [b[:4].view("<f4")[0] * int(q) for q in b[4:260].view(np.int8)])
