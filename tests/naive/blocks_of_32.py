"""Twins of the formats with 32 values a block and one scale: Q4_0, Q4_1, Q5_0, Q5_1, Q8_0.

Block layouts, in bytes:

  Q4_0  d half | 16 bytes codes             x = d * (code - 8)
  Q4_1  d half | m half | 16 bytes codes    x = d * code + m
  Q5_0  d half | qh | 16 bytes codes        x = d * (code - 16)
  Q5_1  d half | m half | qh | 16 bytes     x = d * code + m
  Q8_0  d half | 32 signed bytes            x = d * code

Byte i of the 16 holds value i in its low half and value i + 16 in its high half; bit i of qh, a uint32, is
the fifth bit of value i.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

from tests.naive.floats import as_int8, f32, from_half, round_half_away, to_half, truncate
from tests.naive.searches import (
    importance_weights,
    largest_magnitude,
    scale_and_minimum,
    signed_scale,
    sum_of_squares,
)

Row = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]

BLOCK_ELEMS = 32


def blocks_of(row: Row, importances: Row | None) -> Iterator[tuple[Row, list[f32] | None]]:
    """Yield (x, w) of each block; w is None without importances."""
    mean_square = sum_of_squares(row) / f32(len(row))
    for start in range(0, len(row), BLOCK_ELEMS):
        x = row[start : start + BLOCK_ELEMS]
        if importances is None:
            yield x, None
        else:
            yield x, importance_weights(x, importances[start : start + BLOCK_ELEMS], mean_square)


# ---- encode


def inverse_or_zero(d: f32) -> f32:
    return 1 / d if d != 0 else f32(0)


def signed_codes(x: Row, w: list[f32] | None, half: int) -> tuple[f32, list[int]]:
    """Return (d, codes 0..2*half-1) of a block without a minimum."""
    if w is not None:
        return signed_scale(x, w, half)
    d = largest_magnitude(x) / -half
    inverse = inverse_or_zero(d)
    codes = [as_int8(truncate(value * inverse + f32(half + 0.5))) for value in x]
    return d, [min(2 * half - 1, code) & 0xFF for code in codes]


def unsigned_codes(x: Row, w: list[f32] | None, top: int) -> tuple[f32, f32, list[int]]:
    """Return (d, m, codes 0..top) of a block with a minimum."""
    if w is not None:
        scale, offset, codes = scale_and_minimum(x, w, top, -0.9, 0.05, 36)
        return scale, -offset, codes
    low, high = min(x), max(x)
    d = (high - low) / top
    inverse = inverse_or_zero(d)
    codes = [truncate((value - low) * inverse + f32(0.5)) & 0xFF for value in x]
    return d, low, [min(top, as_int8(code)) & 0xFF if top == 15 else code for code in codes]


def half_bytes(*values: f32) -> Bytes:
    return np.array([to_half(value) for value in values], "<u2").view(np.uint8)


def nibbles(codes: list[int]) -> Bytes:
    """Return the low four bits of 32 codes in 16 bytes."""
    return np.array([codes[i] & 0xF | (codes[i + 16] & 0xF) << 4 for i in range(16)], np.uint8)


def fifth_bits(codes: list[int]) -> Bytes:
    """Return bit 4 of 32 codes in 4 bytes."""
    return np.array([sum((code >> 4 & 1) << i for i, code in enumerate(codes))], "<u4").view(np.uint8)


def encode(row: Row, importances: Row | None, block: Callable[[Row, list[f32] | None], list[Bytes]]) -> Bytes:
    with np.errstate(all="ignore"):
        parts = [part for x, w in blocks_of(row, importances) for part in block(x, w)]
    return np.concatenate(parts)


def quantize_q4_0(row: Row, importances: Row | None) -> Bytes:
    def block(x: Row, w: list[f32] | None) -> list[Bytes]:
        d, codes = signed_codes(x, w, 8)
        # the two halves of a byte are joined with all the bits of the second code shifted by four
        return [half_bytes(d), np.array([codes[i] | codes[i + 16] << 4 & 0xFF for i in range(16)], np.uint8)]

    return encode(row, importances, block)


def quantize_q4_1(row: Row, importances: Row | None) -> Bytes:
    def block(x: Row, w: list[f32] | None) -> list[Bytes]:
        d, m, codes = unsigned_codes(x, w, 15)
        return [
            half_bytes(d, m),
            np.array([codes[i] | codes[i + 16] << 4 & 0xFF for i in range(16)], np.uint8),
        ]

    return encode(row, importances, block)


def quantize_q5_0(row: Row, importances: Row | None) -> Bytes:
    def block(x: Row, w: list[f32] | None) -> list[Bytes]:
        d, codes = signed_codes(x, w, 16)
        return [half_bytes(d), fifth_bits(codes), nibbles(codes)]

    return encode(row, importances, block)


def quantize_q5_1(row: Row, importances: Row | None) -> Bytes:
    def block(x: Row, w: list[f32] | None) -> list[Bytes]:
        d, m, codes = unsigned_codes(x, w, 31)
        return [half_bytes(d, m), fifth_bits(codes), nibbles(codes)]

    return encode(row, importances, block)


def quantize_q8_0(row: Row, importances: Row | None) -> Bytes:
    """Importances are not used: the scale is that of the largest magnitude."""

    def block(x: Row, _w: list[f32] | None) -> list[Bytes]:
        d = abs(largest_magnitude(x)) / 127
        inverse = inverse_or_zero(d)
        codes = [as_int8(truncate(round_half_away(value * inverse))) for value in x]
        return [half_bytes(d), np.array(codes, np.int8).view(np.uint8)]

    return encode(row, None, block)


# ---- decode


def split_nibbles(data: Bytes) -> list[int]:
    return [int(byte) & 0xF for byte in data] + [int(byte) >> 4 for byte in data]


def decode(data: Bytes, block_bytes: int, block: Callable[[Bytes], list[f32]]) -> Row:
    with np.errstate(all="ignore"):
        return np.array(
            [
                x
                for start in range(0, len(data), block_bytes)
                for x in block(data[start : start + block_bytes])
            ]
        )


def half_at(data: Bytes, offset: int) -> f32:
    return from_half(data[offset : offset + 2].view("<u2")[0])


def with_fifth_bits(codes: list[int], bits: Bytes) -> list[int]:
    word = int(bits.copy().view("<u4")[0])
    return [code | (word >> i & 1) << 4 for i, code in enumerate(codes)]


def add(first: f32, second: f32) -> f32:
    """Return the sum; of two NaN it keeps the first, which an addition alone does not promise."""
    return first if np.isnan(first) else first + second


def dequantize_q4_0(data: Bytes) -> Row:
    return decode(data, 18, lambda b: [(code - 8) * half_at(b, 0) for code in split_nibbles(b[2:])])


def dequantize_q4_1(data: Bytes) -> Row:
    return decode(
        data, 20, lambda b: [add(code * half_at(b, 0), half_at(b, 2)) for code in split_nibbles(b[4:])]
    )


def dequantize_q5_0(data: Bytes) -> Row:
    def block(b: Bytes) -> list[f32]:
        return [(code - 16) * half_at(b, 0) for code in with_fifth_bits(split_nibbles(b[6:]), b[2:6])]

    return decode(data, 22, block)


def dequantize_q5_1(data: Bytes) -> Row:
    def block(b: Bytes) -> list[f32]:
        codes = with_fifth_bits(split_nibbles(b[8:]), b[4:8])
        return [add(code * half_at(b, 0), half_at(b, 2)) for code in codes]

    return decode(data, 24, block)


def dequantize_q8_0(data: Bytes) -> Row:
    return decode(data, 34, lambda b: [int(code) * half_at(b, 0) for code in b[2:].view(np.int8)])
