"""Twins of the formats on sixteen uneven levels: IQ4_NL and IQ4_XS.

Block layouts, in bytes:

  IQ4_NL  d half | 16 bytes codes                                       x = d * level[code]
  IQ4_XS  d half | high 2 bits of 8 s | low 4 bits of 8 s | 128 codes   x = d * (s - 32) * level[code]

Sixteen bytes hold 32 codes: byte i has value i in its low half and value i + 16 in its high half.
"""

from __future__ import annotations

import numpy as np

from tests.naive.blocks_of_32 import Bytes, Row, decode, half_at, half_bytes, nibbles, split_nibbles
from tests.naive.floats import clamp, f32, nearest
from tests.naive.searches import TINY, Numbers, importance_weights, largest_magnitude, sum_of_squares

LEVELS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


def nearest_level(x: f32) -> int:
    """Return the code of the level nearest to `x`, the upper one of equals; a NaN gets the last."""
    code = 0
    while code < 15 and not x - LEVELS[code] < LEVELS[code + 1] - x:
        code += 1
    return code


def level_scale(x: Numbers, w: Numbers) -> f32:
    """Return the scale with x about scale * level.

    The first guess maps the largest magnitude to 127; 15 inverse scales around the one that maps it to -127
    follow. For given levels l the best scale is sum(w*l*x) / sum(w*l*l), and the trial with the largest
    gain sum(w*l*x)**2 / sum(w*l*l) wins, the earliest of equals.
    """
    peak = largest_magnitude(x)
    if abs(peak) < TINY:
        return f32(0)
    scale = gain = f32(0)
    inverses = [1 / (peak / 127)] + [f32(step - 127) / peak for step in range(-7, 8)]
    for trial, inverse in enumerate(inverses):
        sum_lx = sum_ll = f32(0)
        for value, weight in zip(x, w, strict=True):
            level = LEVELS[nearest_level(inverse * value)]
            sum_lx += weight * level * value
            sum_ll += weight * level * level
        if sum_ll > 0 and (trial == 0 or sum_lx * sum_lx > gain * sum_ll):
            scale = sum_lx / sum_ll
            gain = scale * sum_lx
    return scale


def error_weights(x: Row, importances: Row | None) -> list[f32]:
    """Return the weights of a block's errors; with importances they grow with its mean square, doubled."""
    if importances is None:
        return [value * value for value in x]
    return importance_weights(x, importances, sum_of_squares(x) * f32(2 / len(x)))


def inverse_or_zero(scale: f32) -> f32:
    return 1 / scale if scale != 0 else f32(0)


def quantize_iq4_nl(row: Row, importances: Row | None) -> Bytes:
    parts = []
    with np.errstate(all="ignore"):
        for start in range(0, len(row), 32):
            x = row[start : start + 32]
            d = level_scale(x, error_weights(x, importances_at(importances, start, 32)))
            codes = [nearest_level(inverse_or_zero(d) * value) for value in x]
            parts += [half_bytes(d), nibbles(codes)]
    return np.concatenate(parts)


def quantize_iq4_xs(row: Row, importances: Row | None) -> Bytes:
    parts = []
    with np.errstate(all="ignore"):
        for start in range(0, len(row), 256):
            x = row[start : start + 256]
            w = error_weights(x, importances_at(importances, start, 256))
            groups = [slice(first, first + 32) for first in range(0, 256, 32)]
            scales = [level_scale(x[group], w[group]) for group in groups]
            d = -largest_magnitude(scales) / 32
            levels = [clamp(nearest(inverse_or_zero(d) * scale), -32, 31) for scale in scales]
            high = sum((level + 32 >> 4) << 2 * j for j, level in enumerate(levels))
            low = [levels[j] + 32 & 0xF | (levels[j + 1] + 32 & 0xF) << 4 for j in range(0, 8, 2)]
            parts += [half_bytes(d), np.array([high], "<u2").view(np.uint8), np.array(low, np.uint8)]
            for group, level in zip(groups, levels, strict=True):
                inverse = inverse_or_zero(d * level)
                parts.append(nibbles([nearest_level(inverse * value) for value in x[group]]))
    return np.concatenate(parts)


def importances_at(importances: Row | None, start: int, count: int) -> Row | None:
    return None if importances is None else importances[start : start + count]


def dequantize_iq4_nl(data: Bytes) -> Row:
    return decode(data, 18, lambda b: [half_at(b, 0) * LEVELS[code] for code in split_nibbles(b[2:])])


def dequantize_iq4_xs(data: Bytes) -> Row:
    def block(b: Bytes) -> list[f32]:
        high = int(b[2:4].view("<u2")[0])
        values = []
        for j in range(8):
            s = int(b[4 + j // 2]) >> 4 * (j % 2) & 0xF | (high >> 2 * j & 3) << 4
            scale = half_at(b, 0) * (s - 32)
            values += [scale * LEVELS[code] for code in split_nibbles(b[8 + 16 * j : 24 + 16 * j])]
        return values

    return decode(data, 136, block)
