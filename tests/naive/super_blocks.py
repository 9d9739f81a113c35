"""Twins of the formats with 256 values a block and quantized scales: Q2_K, Q3_K, Q4_K, Q5_K, Q6_K.

A super-block holds groups of 16 or 32 values. Each group has a scale (and a minimum) as a small integer,
and the super-block has one half for the scales (and one for the minimums). Block layouts, in bytes:

  Q2_K  16 s and m | 64 codes | d | dmin                      x = d * s * code - dmin * m
  Q3_K  32 high bits | 64 codes | 12 s | d                    x = d * (s - 32) * (code - 4)
  Q4_K  d | dmin | 12 s and m | 128 codes                     x = d * s * code - dmin * m
  Q5_K  d | dmin | 12 s and m | 32 high bits | 128 codes      x = d * s * code - dmin * m
  Q6_K  128 low bits | 64 high bits | 16 signed s | d         x = d * s * (code - 32)

How codes are spread: `place_*` and `fetch_*` below.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from tests.naive.floats import as_int8, clamp, f32, from_half, nearest, to_half
from tests.naive.searches import (
    TINY,
    importance_weights,
    largest_magnitude,
    positive_scale,
    scale_and_minimum,
    signed_scale,
    signed_scale_by_moves,
    sum_of_squares,
    total,
)

Row = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]

BLOCK_ELEMS = 256


def encode(
    row: Row, importances: Row | None, plain: Callable[[Row], Bytes], weighted: Callable[[Row, Row], Bytes]
) -> Bytes:
    starts = range(0, len(row), BLOCK_ELEMS)
    with np.errstate(all="ignore"):
        if importances is None:
            return np.concatenate([plain(row[s : s + BLOCK_ELEMS]) for s in starts])
        return np.concatenate(
            [weighted(row[s : s + BLOCK_ELEMS], importances[s : s + BLOCK_ELEMS]) for s in starts]
        )


def decode(data: Bytes, block_bytes: int, block: Callable[[Bytes], list[f32]]) -> Row:
    with np.errstate(all="ignore"):
        starts = range(0, len(data), block_bytes)
        return np.array([x for s in starts for x in block(data[s : s + block_bytes])])


def groups_of(x: Row, size: int) -> list[Row]:
    return [x[start : start + size] for start in range(0, BLOCK_ELEMS, size)]


def half_bytes(*values: f32) -> Bytes:
    return np.array([to_half(value) for value in values], "<u2").view(np.uint8)


def half_at(data: Bytes, offset: int) -> f32:
    return from_half(data[offset : offset + 2].view("<u2")[0])


def as_stored(value: f32) -> f32:
    """Return `value` as the decoder will see it."""
    return from_half(to_half(value))


# ---- where the bits go


def place_2_bits(codes: list[int]) -> Bytes:
    """Return 256 codes of 2 bits in 64 bytes: byte i of a half holds values i, i+32, i+64, i+96."""
    return np.array(
        [
            sum((codes[n + i + 32 * k] & 0xFF) << 2 * k for k in range(4)) & 0xFF
            for n in (0, 128)
            for i in range(32)
        ],
        np.uint8,
    )


def fetch_2_bits(data: Bytes) -> list[int]:
    return [int(data[n // 4 + i]) >> 2 * k & 3 for n in (0, 128) for k in range(4) for i in range(32)]


def place_4_bits(codes: list[int]) -> Bytes:
    """Return the low 4 bits of 256 codes in 128 bytes: for each 64, byte i holds values i and i + 32."""
    return np.array(
        [codes[n + i] & 0xF | (codes[n + i + 32] & 0xF) << 4 for n in range(0, 256, 64) for i in range(32)],
        np.uint8,
    )


def fetch_4_bits(data: Bytes) -> list[int]:
    return [
        int(data[n // 2 + i]) >> 4 * k & 0xF for n in range(0, 256, 64) for k in range(2) for i in range(32)
    ]


def place_1_bit(bits: list[int]) -> Bytes:
    """Return 256 bits in 32 bytes: bit k of byte i is value 32*k + i."""
    return np.array([sum(bits[32 * k + i] << k for k in range(8)) for i in range(32)], np.uint8)


def fetch_1_bit(data: Bytes) -> list[int]:
    return [int(data[i]) >> k & 1 for k in range(8) for i in range(32)]


def place_scales_and_minimums(scales: list[int], minimums: list[int]) -> Bytes:
    """Return 8 scales and 8 minimums of 6 bits in 12 bytes.

    Bytes 0..3 and 4..7: the first four of each, with the upper 2 bits of the last four above them; bytes
    8..11: the lower 4 bits of the last four, scale below minimum.
    """
    return np.array(
        [scales[i] | scales[i + 4] >> 4 << 6 for i in range(4)]
        + [minimums[i] | minimums[i + 4] >> 4 << 6 for i in range(4)]
        + [scales[i + 4] & 0xF | (minimums[i + 4] & 0xF) << 4 for i in range(4)],
        np.uint8,
    )


def fetch_scales_and_minimums(data: Bytes) -> tuple[list[int], list[int]]:
    b = [int(byte) for byte in data]
    scales = [b[i] & 63 for i in range(4)] + [b[i + 8] & 0xF | b[i] >> 6 << 4 for i in range(4)]
    minimums = [b[i + 4] & 63 for i in range(4)] + [b[i + 8] >> 4 | b[i + 4] >> 6 << 4 for i in range(4)]
    return scales, minimums


def place_16_scales(scales: list[int]) -> Bytes:
    """Return 16 scales of 6 bits in 12 bytes: low bits of i and i + 8 in byte i, upper 2 bits last."""
    return np.array(
        [scales[i] & 0xF | (scales[i + 8] & 0xF) << 4 for i in range(8)]
        + [sum((scales[i + 4 * k] >> 4 & 3) << 2 * k for k in range(4)) for i in range(4)],
        np.uint8,
    )


def fetch_16_scales(data: Bytes) -> list[int]:
    b = [int(byte) for byte in data]
    low = [b[i] & 0xF for i in range(8)] + [b[i] >> 4 for i in range(8)]
    return [low[i] | (b[8 + i % 4] >> 2 * (i // 4) & 3) << 4 for i in range(16)]


# ---- codes for scales as they were stored


def codes_with_minimum(
    groups: list[Row],
    found: list[list[int]],
    scales: list[int],
    minimums: list[int],
    d: f32,
    dmin: f32,
    top: int,
) -> list[int]:
    """Return the codes that fit the stored scales; a group with a scale of 0 keeps what its search found."""
    codes: list[int] = []
    for group, old, s, m in zip(groups, found, scales, minimums, strict=True):
        scale = d * s
        if scale == 0:
            codes += old
        else:
            codes += [clamp(nearest((value + dmin * m) / scale), 0, top) for value in group]
    return codes


def codes_around_zero(
    groups: list[Row], found: list[list[int]], scales: list[int], d: f32, half: int
) -> list[int]:
    """Return the codes 0..2*half-1 that fit the stored scales; as above for a scale of 0."""
    codes: list[int] = []
    for group, old, s in zip(groups, found, scales, strict=True):
        scale = d * s
        if scale == 0:
            codes += old
        else:
            codes += [clamp(nearest(value / scale), -half, half - 1) + half for value in group]
    return codes


# ---- Q2_K


def quantize_q2_k(row: Row, importances: Row | None) -> Bytes:
    def pack(
        x: Row, found: list[list[int]], scales: list[int], minimums: list[int], d: f32, dmin: f32
    ) -> Bytes:
        nibble_pairs = [(s | m << 4) & 0xFF for s, m in zip(scales, minimums, strict=True)]
        codes = codes_with_minimum(
            groups_of(x, 16),
            found,
            [b & 0xF for b in nibble_pairs],
            [b >> 4 for b in nibble_pairs],
            as_stored(d),
            as_stored(dmin),
            3,
        )
        return np.concatenate([np.array(nibble_pairs, np.uint8), place_2_bits(codes), half_bytes(d, dmin)])

    def plain(x: Row) -> Bytes:
        searched = [
            scale_and_minimum(g, [abs(value) for value in g], 3, -0.5, 0.1, 15, absolute=True)
            for g in groups_of(x, 16)
        ]
        scales, d = codes_of_largest([s for s, _, _ in searched], 15)
        minimums, dmin = codes_of_largest([m for _, m, _ in searched], 15)
        return pack(x, [codes for _, _, codes in searched], [s & 0xFF for s in scales], minimums, d, dmin)

    def weighted(x: Row, importances: Row) -> Bytes:
        mean_square = sum_of_squares(x) / f32(BLOCK_ELEMS)
        weights = [
            importance_weights(g, i, mean_square)
            for g, i in zip(groups_of(x, 16), groups_of(importances, 16), strict=True)
        ]
        searched = [
            scale_and_minimum(g, w, 3, -0.9, 0.05, 36) for g, w in zip(groups_of(x, 16), weights, strict=True)
        ]
        group_weights = [total(w) for w in weights]
        d, scales = positive_scale([s for s, _, _ in searched], group_weights, 15)
        dmin, minimums = positive_scale([m for _, m, _ in searched], group_weights, 15)
        return pack(x, [codes for _, _, codes in searched], scales, minimums, d, dmin)

    return encode(row, importances, plain, weighted)


def codes_of_largest(values: list[f32], top: int) -> tuple[list[int], f32]:
    """Return (codes, d) so that values are about d * code, `top` for the largest; 0 if none is positive."""
    largest = f32(0)
    for value in values:
        largest = value if value > largest else largest
    if not largest > 0:
        return [0] * len(values), f32(0)
    inverse = f32(top) / largest
    return [nearest(inverse * value) for value in values], largest / f32(top)


def dequantize_q2_k(data: Bytes) -> Row:
    def block(b: Bytes) -> list[f32]:
        d, dmin = half_at(b, 80), half_at(b, 82)
        codes = fetch_2_bits(b[16:80])
        return [
            d * (int(b[i // 16]) & 0xF) * code - dmin * (int(b[i // 16]) >> 4) for i, code in enumerate(codes)
        ]

    return decode(data, 84, block)


# ---- Q3_K


def quantize_q3_k(row: Row, importances: Row | None) -> Bytes:
    def pack(x: Row, found: list[list[int]], scales: list[int], d: f32) -> Bytes:
        codes = codes_around_zero(groups_of(x, 16), found, [s - 32 for s in scales], as_stored(d), 4)
        return np.concatenate(
            [
                place_1_bit([int(code > 3) for code in codes]),
                place_2_bits([code - 4 if code > 3 else code for code in codes]),
                place_16_scales(scales),
                half_bytes(d),
            ]
        )

    def plain(x: Row) -> Bytes:
        searched = [signed_scale_by_moves(g, 4) for g in groups_of(x, 16)]
        largest = largest_magnitude([scale for scale, _ in searched])
        found = [codes for _, codes in searched]
        if largest == 0:
            # nothing is stored for the scales: all of them read as -32, and d is 0
            return pack(x, found, [0] * 16, f32(0))
        inverse = f32(-32) / largest
        scales = [clamp(as_int8(nearest(inverse * scale)), -32, 31) + 32 for scale, _ in searched]
        return pack(x, found, scales, 1 / inverse)

    def weighted(x: Row, importances: Row) -> Bytes:
        mean_square = 2 * sum_of_squares(x) / f32(BLOCK_ELEMS)
        weights = [
            importance_weights(g, i, mean_square)
            for g, i in zip(groups_of(x, 16), groups_of(importances, 16), strict=True)
        ]
        searched = [signed_scale(g, w, 4) for g, w in zip(groups_of(x, 16), weights, strict=True)]
        d, scales = signed_scale([scale for scale, _ in searched], [total(w) for w in weights], 32)
        return pack(x, [codes for _, codes in searched], scales, d)

    return encode(row, importances, plain, weighted)


def dequantize_q3_k(data: Bytes) -> Row:
    def block(b: Bytes) -> list[f32]:
        d = half_at(b, 108)
        scales = fetch_16_scales(b[96:108])
        codes = [
            low - (0 if high else 4)
            for low, high in zip(fetch_2_bits(b[32:96]), fetch_1_bit(b[:32]), strict=True)
        ]
        return [d * (scales[i // 16] - 32) * code for i, code in enumerate(codes)]

    return decode(data, 110, block)


# ---- Q4_K and Q5_K


def quantize_scaled_minimums(
    row: Row,
    importances: Row | None,
    top: int,
    plain_grid: tuple[float, float, int],
    pack_codes: Callable[[list[int]], list[Bytes]],
) -> Bytes:
    """Return the blocks of Q4_K (top 15) or Q5_K (top 31); plain_grid: the search without importances."""

    def pack(
        x: Row, found: list[list[int]], scales: list[int], minimums: list[int], d: f32, dmin: f32
    ) -> Bytes:
        codes = codes_with_minimum(
            groups_of(x, 32), found, scales, minimums, as_stored(d), as_stored(dmin), top
        )
        stored = place_scales_and_minimums(scales, minimums)
        return np.concatenate([half_bytes(d, dmin), stored, *pack_codes(codes)])

    def plain(x: Row) -> Bytes:
        searched = []
        for g in groups_of(x, 32):
            average = np.sqrt(sum_of_squares(g) / f32(32))
            searched.append(scale_and_minimum(g, [average + abs(value) for value in g], top, *plain_grid))
        largest_scale = max([f32(0)] + [s for s, _, _ in searched])
        largest_minimum = max([f32(0)] + [m for _, m, _ in searched])
        inverse_scale = f32(63) / largest_scale if largest_scale > 0 else f32(0)
        inverse_minimum = f32(63) / largest_minimum if largest_minimum > 0 else f32(0)
        return pack(
            x,
            [codes for _, _, codes in searched],
            [min(63, nearest(inverse_scale * s) & 0xFF) for s, _, _ in searched],
            [min(63, nearest(inverse_minimum * m) & 0xFF) for _, m, _ in searched],
            largest_scale / f32(63),
            largest_minimum / f32(63),
        )

    def weighted(x: Row, importances: Row) -> Bytes:
        mean_square = 2 * sum_of_squares(x) / f32(BLOCK_ELEMS)
        weights = [
            importance_weights(g, i, mean_square)
            for g, i in zip(groups_of(x, 32), groups_of(importances, 32), strict=True)
        ]
        searched = [
            scale_and_minimum(g, w, top, -0.9, 0.05, 36)
            for g, w in zip(groups_of(x, 32), weights, strict=True)
        ]
        group_weights = [total(w) for w in weights]
        d, scales = positive_scale([s for s, _, _ in searched], group_weights, 63)
        dmin, minimums = positive_scale([m for _, m, _ in searched], group_weights, 63)
        return pack(x, [codes for _, _, codes in searched], scales, minimums, d, dmin)

    return encode(row, importances, plain, weighted)


def quantize_q4_k(row: Row, importances: Row | None) -> Bytes:
    return quantize_scaled_minimums(
        row, importances, 15, (-1.0, 0.1, 20), lambda codes: [place_4_bits(codes)]
    )


def quantize_q5_k(row: Row, importances: Row | None) -> Bytes:
    def pack_codes(codes: list[int]) -> list[Bytes]:
        return [place_1_bit([code >> 4 for code in codes]), place_4_bits(codes)]

    return quantize_scaled_minimums(row, importances, 31, (-0.5, 0.1, 15), pack_codes)


def decode_scaled_minimums(b: Bytes, codes: list[int]) -> list[f32]:
    d, dmin = half_at(b, 0), half_at(b, 2)
    scales, minimums = fetch_scales_and_minimums(b[4:16])
    return [d * scales[i // 32] * code - dmin * minimums[i // 32] for i, code in enumerate(codes)]


def dequantize_q4_k(data: Bytes) -> Row:
    return decode(data, 144, lambda b: decode_scaled_minimums(b, fetch_4_bits(b[16:])))


def dequantize_q5_k(data: Bytes) -> Row:
    def block(b: Bytes) -> list[f32]:
        codes = [
            low | high << 4 for low, high in zip(fetch_4_bits(b[48:]), fetch_1_bit(b[16:48]), strict=True)
        ]
        return decode_scaled_minimums(b, codes)

    return decode(data, 176, block)


# ---- Q6_K


def quantize_q6_k(row: Row, importances: Row | None) -> Bytes:
    def block(x: Row, importances: Row) -> Bytes:
        searched = [
            signed_scale(g, list(w), 32)
            for g, w in zip(groups_of(x, 16), groups_of(importances, 16), strict=True)
        ]
        largest = largest_magnitude([scale for scale, _ in searched])
        if abs(largest) < TINY:
            return np.zeros(210, np.uint8)
        inverse = f32(-128) / largest
        scales = [as_int8(min(127, nearest(inverse * scale))) for scale, _ in searched]
        d = 1 / inverse
        codes = codes_around_zero(groups_of(x, 16), [c for _, c in searched], scales, as_stored(d), 32)
        return np.concatenate([*place_6_bits(codes), np.array(scales, np.int8).view(np.uint8), half_bytes(d)])

    return encode(row, importances, lambda x: block(x, x * x), block)


def place_6_bits(codes: list[int]) -> list[Bytes]:
    """Return (128 bytes of low halves, 64 bytes of upper 2 bits) of 256 codes of 6 bits.

    In each half of 128: low byte i holds values i and i + 64, low byte i + 32 values i + 32 and i + 96;
    high byte i holds values i, i+32, i+64, i+96.
    """
    low = [codes[n + i] & 0xF | (codes[n + i + 64] & 0xF) << 4 for n in (0, 128) for i in range(64)]
    high = [sum((codes[n + i + 32 * k] >> 4) << 2 * k for k in range(4)) for n in (0, 128) for i in range(32)]
    return [np.array(low, np.uint8), np.array(high, np.uint8)]


def fetch_6_bits(low: Bytes, high: Bytes) -> list[int]:
    low_bits = [int(low[n // 2 + i]) >> 4 * k & 0xF for n in (0, 128) for k in range(2) for i in range(64)]
    return [a | b << 4 for a, b in zip(low_bits, fetch_2_bits(high), strict=True)]


def dequantize_q6_k(data: Bytes) -> Row:
    def block(b: Bytes) -> list[f32]:
        d = half_at(b, 208)
        scales = b[192:208].view(np.int8)
        codes = fetch_6_bits(b[:128], b[128:192])
        return [d * int(scales[i // 16]) * (code - 32) for i, code in enumerate(codes)]

    return decode(data, 210, block)
