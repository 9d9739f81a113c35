"""Twins of IQ1_S and IQ1_M: 256 values a block, 8 at a time one of the 2048 points of a grid.

A point has a code 0, 1 or 2 for each of 8 values. A code c stands for c - 1 + shift, where the shift is 1/8
or -1/8: one choice for 32 values (IQ1_S) or for 8 (IQ1_M). Block layouts, in bytes:

  IQ1_S  d | 32 indices, low 8 bits | 8 words: 4 indices, upper 3 bits | s, 3 bits | minus, 1 bit
  IQ1_M  32 indices, low 8 bits | 16 bytes: 2 x (index, upper 3 bits | minus) | 4 words: 4 s | 4 bits of d

  x = d * (2 * s + 1) * (code - 1 + shift)
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from quantize.formats.iq import grids
from tests.naive.floats import clamp, f32, from_half, nearest, to_half
from tests.naive.searches import importance_weights, sum_of_squares
from tests.naive.super_blocks import BLOCK_ELEMS, decode, groups_of

Row = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]
Numbers = Sequence[f32] | Row
Codes = tuple[int, ...]

PLUS = (f32(-0.875), f32(0.125), f32(1.125))
MINUS = (f32(-1.125), f32(-0.125), f32(0.875))
"""What the codes 0, 1, 2 stand for under either shift."""

POINTS: list[Codes] = [tuple(int(code) for code in point) for point in grids.IQ1.levels]
INDEX = {point: index for index, point in enumerate(POINTS)}
LARGEST = np.finfo(f32).max


# ---- points of the grid


def neighbours(codes: Codes) -> list[int]:
    """Return the points at the three least distances that occur, nearest first, then by index."""
    distances = ((grids.IQ1.levels.astype(int) - codes) ** 2).sum(axis=1).tolist()
    farthest = sorted(set(distances))[2]
    near = [index for index, distance in enumerate(distances) if distance <= farthest]
    return sorted(near, key=lambda index: distances[index])


def nearest_point(codes: Codes, x: Numbers, w: Numbers, scale: f32, levels: Sequence[f32]) -> int:
    """Return the index of the point for 8 values: that of `codes`, or else the best neighbour.

    Best is the least error, the first of equals. Where none is a finite number the reference aborts.
    """
    if codes in INDEX:
        return INDEX[codes]
    best, least = None, LARGEST
    for index in neighbours(codes):
        error = f32(0)
        for value, weight, code in zip(x, w, POINTS[index], strict=True):
            difference = scale * levels[code] - value
            error += weight * difference * difference
        if error < least:
            best, least = index, error
    if best is None:
        raise OverflowError("no neighbour is at a distance that float32 can hold")
    return best


def refit(points: list[int], levels: list[tuple[f32, ...]], x: Numbers, w: Numbers, scale: f32) -> f32:
    """Return the best scale for given points, each with its levels; `scale` if there is none."""
    sum_xq = sum_qq = f32(0)
    for i, (value, weight) in enumerate(zip(x, w, strict=True)):
        level = levels[i // 8][POINTS[points[i // 8]][i % 8]]
        sum_xq += weight * level * value
        sum_qq += weight * level * level
    return sum_xq / sum_qq if sum_xq > 0 and sum_qq > 0 else scale


def code_points(
    codes: list[int], x: Numbers, w: Numbers, scale: f32, levels: list[tuple[f32, ...]]
) -> tuple[f32, list[int]]:
    """Return the scale and the points for the codes of a group; the scale changes if a code had to."""
    points = [
        nearest_point(tuple(codes[s : s + 8]), x[s : s + 8], w[s : s + 8], scale, levels[s // 8])
        for s in range(0, len(x), 8)
    ]
    if any(tuple(codes[8 * k : 8 * k + 8]) != POINTS[point] for k, point in enumerate(points)):
        scale = refit(points, levels, x, w, scale)
    return scale, points


# ---- where a sorted group is cut


def cut(order: list[int], first: int, second: int, *, flip: bool) -> list[int]:
    """Return codes by position: 0 for the `first` ones in order, 1 up to `second`, then 2; or 2, 1, 0."""
    codes = [0] * len(order)
    for rank, i in enumerate(order):
        code = 0 if rank < first else 1 if rank < second else 2
        codes[i] = 2 - code if flip else code
    return codes


def fit_group_s(x: Row, w: Numbers) -> tuple[f32, list[int], tuple[f32, ...]] | None:
    """Return (scale, codes, levels) of 32 values for IQ1_S, or None if nothing fits.

    Codes grow with the values, so two cuts through the sorted values make them. All cuts are tried, with
    both shifts. For given codes the gain is sum(w*x*q)**2 / sum(w*q*q); the largest wins, first of equals.
    """
    order = sorted(range(len(x)), key=lambda i: x[i])
    sum_x, sum_w = [f32(0)], [f32(0)]
    for i in order:
        sum_x.append(sum_x[-1] + w[i] * x[i])
        sum_w.append(sum_w[-1] + w[i])
    best = None
    gain = -LARGEST
    for first in range(len(x) + 1):
        for second in range(first, len(x) + 1):
            for levels in (PLUS, MINUS):
                low, middle, high = levels
                xq = sum_x[first] * low + (sum_x[second] - sum_x[first]) * middle
                xq += (sum_x[-1] - sum_x[second]) * high
                qq = sum_w[first] * low * low + (sum_w[second] - sum_w[first]) * middle * middle
                qq += (sum_w[-1] - sum_w[second]) * high * high
                if qq > 0 and xq * xq > gain * qq:
                    scale = xq / qq
                    gain = scale * xq
                    best = scale, first, second, levels
    if best is None:
        return None
    scale, first, second, levels = best
    if scale < 0:
        return -scale, cut(order, first, second, flip=True), MINUS if levels is PLUS else PLUS
    return scale, cut(order, first, second, flip=False), levels


def fit_group_m(x: Row, w: Numbers) -> tuple[f32, list[int], list[tuple[f32, ...]]] | None:
    """Return (scale, codes, levels of either half) of 16 values for IQ1_M, or None if nothing fits.

    As `fit_group_s`, but each half of 8 has its own shift, so sums are kept for each half. A step in code is
    a step of 1 in level, so xq = top level * sum over all - (sum below one cut + sum below the other).
    """
    order = sorted(range(len(x)), key=lambda i: x[i])
    sum_x, sum_w = [[f32(0)], [f32(0)]], [[f32(0)], [f32(0)]]
    for i in order:
        for half in range(2):
            inside = i // 8 == half
            sum_x[half].append(sum_x[half][-1] + w[i] * x[i] if inside else sum_x[half][-1])
            sum_w[half].append(sum_w[half][-1] + w[i] if inside else sum_w[half][-1])

    def sums(half: int, first: int, second: int, levels: tuple[f32, ...]) -> tuple[f32, f32]:
        low, middle, high = levels
        below = sum_x[half][first] + sum_x[half][second]
        qq = sum_w[half][-1] * high * high
        qq += sum_w[half][first] * (low * low - middle * middle)
        qq += sum_w[half][second] * (middle * middle - high * high)
        return sum_x[half][-1] * high - below, qq

    best = None
    gain = -LARGEST
    for first in range(len(x) + 1):
        for second in range(first, len(x) + 1):
            for left in (PLUS, MINUS):
                for right in (PLUS, MINUS):
                    xq_left, qq_left = sums(0, first, second, left)
                    xq_right, qq_right = sums(1, first, second, right)
                    xq, qq = xq_left + xq_right, qq_left + qq_right
                    if qq > 0 and xq * xq > gain * qq:
                        scale = xq / qq
                        gain = scale * xq
                        best = scale, first, second, [left, right]
    if best is None:
        return None
    scale, first, second, pair = best
    if scale < 0:
        flipped = [MINUS if levels is PLUS else PLUS for levels in pair]
        return -scale, cut(order, first, second, flip=True), flipped
    return scale, cut(order, first, second, flip=False), pair


def scale_codes(scales: list[f32]) -> tuple[f32, list[int]]:
    """Return (d, codes 0..7) so that the scales are about d * (2 * code + 1), 15 for the largest."""
    largest = f32(0)
    for scale in scales:
        largest = scale if scale > largest else largest
    d = largest / 15
    inverse = 1 / d
    return d, [clamp(nearest(f32(0.5) * (inverse * scale - 1)), 0, 7) for scale in scales]


# ---- IQ1_S


def quantize_iq1_s(row: Row, importances: Row | None) -> Bytes:
    assert importances is not None
    starts = range(0, len(row), BLOCK_ELEMS)
    with np.errstate(all="ignore"):
        return np.concatenate(
            [block_s(row[s : s + BLOCK_ELEMS], importances[s : s + BLOCK_ELEMS]) for s in starts]
        )


def block_s(x: Row, importances: Row) -> Bytes:
    mean_square = 2 * sum_of_squares(x) / f32(BLOCK_ELEMS)
    scales, minus = [f32(0)] * 8, [False] * 8
    low, high = np.zeros(32, np.uint8), np.zeros(8, "<u2")
    for j, (group, of_group) in enumerate(zip(groups_of(x, 32), groups_of(importances, 32), strict=True)):
        w = importance_weights(group, of_group, mean_square)
        found = None if max(abs(group)) < f32(1e-12) else fit_group_s(group, w)
        if found is None:
            continue
        scale, codes, levels = found
        scales[j], points = code_points(codes, group, w, scale, [levels] * 4)
        minus[j] = levels is MINUS
        low[4 * j : 4 * j + 4] = [point & 0xFF for point in points]
        high[j] = sum(point >> 8 << 3 * k for k, point in enumerate(points))
    d = f32(0)
    if any(scale != 0 for scale in scales):
        d, codes = scale_codes(scales)
        high |= np.array([code << 12 | sign << 15 for code, sign in zip(codes, minus, strict=True)], "<u2")
    half = np.array([to_half(d * f32(1.125))], "<u2")
    return np.concatenate([half.view(np.uint8), low, high.view(np.uint8)])


def dequantize_iq1_s(data: Bytes) -> Row:
    def block(b: Bytes) -> list[f32]:
        d = from_half(b[:2].view("<u2")[0])
        low, high = b[2:34], b[34:50].view("<u2")
        values = []
        for k in range(32):
            word = int(high[k // 4])
            point = POINTS[int(low[k]) | (word >> 3 * (k % 4) & 7) << 8]
            scale = d * (2 * (word >> 12 & 7) + 1)
            shift = f32(-0.125) if word & 0x8000 else f32(0.125)
            values += [scale * (code - 1 + shift) for code in point]
        return values

    return decode(data, 50, block)


# ---- IQ1_M


def quantize_iq1_m(row: Row, importances: Row | None) -> Bytes:
    starts = range(0, len(row), BLOCK_ELEMS)
    with np.errstate(all="ignore"):
        return np.concatenate(
            [
                block_m(
                    row[s : s + BLOCK_ELEMS],
                    None if importances is None else importances[s : s + BLOCK_ELEMS],
                )
                for s in starts
            ]
        )


def block_m(x: Row, importances: Row | None) -> Bytes:
    mean_square = 2 * sum_of_squares(x) / f32(BLOCK_ELEMS)
    w = x * x if importances is None else np.array(importance_weights(x, importances, mean_square))
    scales, all_points, all_levels = [], [], []
    low, high = np.zeros(32, np.uint8), np.zeros(16, np.uint8)
    for j, (group, weights) in enumerate(zip(groups_of(x, 16), groups_of(w, 16), strict=True)):
        found = None if max(abs(group)) < f32(1e-7) else fit_group_m(group, weights)
        scale, points, levels = f32(0), [0, 0], [PLUS, PLUS]
        if found is not None:
            scale, codes, levels = found
            scale, points = code_points(codes, group, weights, scale, levels)
        low[2 * j : 2 * j + 2] = [point & 0xFF for point in points]
        high[j] = points[0] >> 8 | points[1] >> 8 << 4
        scales.append(scale)
        all_points += points
        all_levels += levels
    if not any(scale != 0 for scale in scales):
        return np.concatenate([low, high, np.zeros(8, np.uint8)])

    d, codes = scale_codes(scales)
    sum_xq = sum_qq = f32(0)
    for i, (value, weight) in enumerate(zip(x, w, strict=True)):
        level = all_levels[i // 8][POINTS[all_points[i // 8]][i % 8]] * (2 * codes[i // 16] + 1)
        sum_xq += weight * level * value
        sum_qq += weight * level * level
    if sum_qq > 0:
        d = sum_xq / sum_qq
    half = to_half(d * f32(1.1125))
    for j in range(16):
        high[j] |= (all_levels[2 * j] is MINUS) << 3 | (all_levels[2 * j + 1] is MINUS) << 7
    words = [sum(codes[4 * n + k] << 3 * k for k in range(4)) | (half >> 4 * n & 0xF) << 12 for n in range(4)]
    return np.concatenate([low, high, np.array(words, "<u2").view(np.uint8)])


def dequantize_iq1_m(data: Bytes) -> Row:
    def block(b: Bytes) -> list[f32]:
        low, high, words = b[:32], b[32:48], b[48:56].view("<u2")
        d = from_half(sum((int(word) >> 12) << 4 * n for n, word in enumerate(words)))
        values = []
        for k in range(32):
            nibble = int(high[k // 2]) >> 4 * (k % 2)
            point = POINTS[int(low[k]) | (nibble & 7) << 8]
            scale = d * (2 * (int(words[k // 8]) >> 3 * (k // 2 % 4) & 7) + 1)
            shift = f32(-0.125) if nibble & 8 else f32(0.125)
            values += [scale * (code - 1 + shift) for code in point]
        return values

    return decode(data, 56, block)
