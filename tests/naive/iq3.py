"""Twins of IQ3_XXS and IQ3_S: 256 values a block, 4 at a time one of the 256 or 512 points of a grid.

A point has a level 0 to 7 for each of 4 values; signs are stored apart. In the search a level l stands for
2 * l + 1. Groups of 32 values have a scale of 4 bits. Block layouts, in bytes:

  IQ3_XXS  d | 64 indices | 8 words: 4 x 7 signs, s
  IQ3_S    d | 64 indices, low bits | 64 high bits | 256 signs | 4 bytes: 2 x s

  IQ3_XXS  x = +-d * (s + 1/2) / 2 * 4 * (2 * level + 1)
  IQ3_S    x = +-d * (2 * s + 1) * (2 * level + 1)

In IQ3_XXS the highest level stands for 62, not 60, and the eighth sign of each 8 makes their count even.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import numpy.typing as npt

from quantize.formats.iq import grids
from tests.naive.floats import clamp, f32, from_half, nearest, to_half
from tests.naive.searches import importance_weights, sum_of_squares
from tests.naive.super_blocks import BLOCK_ELEMS, decode, groups_of

Row = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]
Levels = tuple[int, ...]

LARGEST = np.finfo(f32).max


class Points:
    """The points of a grid, and which of them are near others.

    shells  how many of the least distances that occur count as near
    """

    def __init__(self, grid: grids.Grid, shells: int) -> None:
        self.levels: list[Levels] = [tuple(int(level) for level in point) for point in grid.levels]
        self.index = {levels: index for index, levels in enumerate(self.levels)}
        self.shells = shells

    @cache  # noqa: B019  two instances, which live as long as the process
    def near(self, levels: Levels) -> list[int]:
        """Return the points at the least distances, nearest first, then by index."""
        distances = [sum((a - b) ** 2 for a, b in zip(levels, point, strict=True)) for point in self.levels]
        farthest = sorted(set(distances))[self.shells - 1]
        found = [index for index, distance in enumerate(distances) if distance <= farthest]
        return sorted(found, key=lambda index: distances[index])

    def best(self, levels: Levels, x: Row, w: list[f32], scale: f32) -> Levels:
        """Return the point for 4 values: `levels` if that is one, or else the near one of least error."""
        if levels in self.index:
            return levels
        best, least = None, LARGEST
        for index in self.near(levels):
            error = f32(0)
            for value, weight, level in zip(x, w, self.levels[index], strict=True):
                difference = scale * (2 * level + 1) - value
                error += weight * difference * difference
            if error < least:
                best, least = index, error
        if best is None:
            raise OverflowError("no finite error: the reference aborts here")
        return self.levels[best]


XXS = Points(grids.IQ3_XXS, 2)
S = Points(grids.IQ3_S, 3)


def levels_for(inverse: f32, x: Row) -> Levels:
    return tuple(clamp(nearest(f32(0.5) * (inverse * value - 1)), 0, 7) for value in x)


def fit(points: list[Levels], x: Row, w: list[f32]) -> tuple[f32, f32]:
    """Return the weighted sums of q * x and of q * q, where q = 2 * level + 1."""
    sum_xq = sum_qq = f32(0)
    for i, (value, weight) in enumerate(zip(x, w, strict=True)):
        q = 2 * points[i // 4][i % 4] + 1
        sum_xq += weight * value * q
        sum_qq += weight * q * q
    return sum_xq, sum_qq


def take_signs(x: Row, w: list[f32], *, even: bool) -> tuple[Row, list[int]]:
    """Return magnitudes and, for each 8 values, bits of signs.

    even  make the count of signs even, by the one whose value weighs least; its magnitude turns negative
    """
    magnitudes = x.copy()
    signs = []
    for start in range(0, len(x), 8):
        bits = 0
        for i in range(8):
            if not x[start + i] >= 0:
                magnitudes[start + i] = -x[start + i]
                bits |= 1 << i
        if even and bits.bit_count() % 2:
            costs = [w[start + i] * x[start + i] * x[start + i] for i in range(8)]
            cheapest = costs.index(min(costs))
            magnitudes[start + cheapest] = -magnitudes[start + cheapest]
            bits ^= 1 << cheapest
        signs.append(bits)
    return magnitudes, signs


def fit_group(x: Row, w: list[f32], grid: Points, reach: int, *, again_all: bool) -> tuple[f32, list[Levels]]:
    """Return the scale and the points of 32 magnitudes.

    Inverse scales around the one that makes the largest 15 compete by their gain sum(w*x*q)**2 / sum(w*q*q);
    the first of equals wins. Then the winning scale gives new points: to those 4 values that were moved onto
    the grid, or to all if any was (again_all).
    """
    top = x[0]
    for value in x:
        top = value if value > top else top
    roots = [np.sqrt(weight) for weight in w]
    fours = range(0, len(x), 4)
    best_points: list[Levels] = [(0, 0, 0, 0)] * 8
    moved = [again_all] * 8
    scale, gain = top / 15, f32(0)
    for step in range(-reach, reach + 1):
        inverse = (step * f32(0.2) + 15) / top
        wanted = [levels_for(inverse, x[s : s + 4]) for s in fours]
        points = [
            grid.best(levels, x[s : s + 4], roots[s : s + 4], 1 / inverse)
            for levels, s in zip(wanted, fours, strict=True)
        ]
        sum_xq, sum_qq = fit(points, x, w)
        if sum_qq > 0 and sum_xq * sum_xq > gain * sum_qq:
            scale = sum_xq / sum_qq
            gain = scale * sum_xq
            best_points = points
            moved = [a != b for a, b in zip(points, wanted, strict=True)]
    if any(moved) and scale > 0:
        for k, s in enumerate(fours):
            if moved[k] or again_all:
                levels = levels_for(1 / scale, x[s : s + 4])
                best_points[k] = grid.best(levels, x[s : s + 4], roots[s : s + 4], scale)
        sum_xq, sum_qq = fit(best_points, x, w)
        if sum_qq > 0:
            scale = sum_xq / sum_qq
    return scale, best_points


def scale_codes(scales: list[f32]) -> tuple[f32, list[int]]:
    """Return (d, codes 0..15) so that the scales are about d * (2 * code + 1), 31 for the largest."""
    d = max(scales) / f32(31)
    inverse = 1 / d
    return d, [clamp(nearest(f32(0.5) * (inverse * scale - 1)), 0, 15) for scale in scales]


def weights_of(x: Row, importances: Row | None) -> list[f32]:
    if importances is None:
        return [value * value for value in x]
    return importance_weights(x, importances, 2 * sum_of_squares(x) / f32(BLOCK_ELEMS))


def half_bytes(value: f32) -> Bytes:
    return np.array([to_half(value)], "<u2").view(np.uint8)


# ---- IQ3_XXS


def quantize_iq3_xxs(row: Row, importances: Row | None) -> Bytes:
    with np.errstate(all="ignore"):
        return np.concatenate([block_xxs(*parts) for parts in blocks_of(row, importances)])


def blocks_of(row: Row, importances: Row | None) -> list[tuple[Row, list[f32]]]:
    """Return the values of each block and their weights."""
    blocks = []
    for start in range(0, len(row), BLOCK_ELEMS):
        x = row[start : start + BLOCK_ELEMS]
        of_block = None if importances is None else importances[start : start + BLOCK_ELEMS]
        blocks.append((x, weights_of(x, of_block)))
    return blocks


def block_xxs(x: Row, w: list[f32]) -> Bytes:
    scales = [f32(0)] * 8
    indices, words = np.zeros(64, np.uint8), np.zeros(8, np.uint32)
    for j, group in enumerate(groups_of(x, 32)):
        weights = w[32 * j : 32 * j + 32]
        magnitudes, signs = take_signs(group, weights, even=True)
        if max(magnitudes) < f32(1e-8):
            continue
        scale, points = fit_group(magnitudes, weights, XXS, 15, again_all=False)
        if scale < 0:
            scale, signs = -scale, [~bits for bits in signs]
        scales[j] = scale
        indices[8 * j : 8 * j + 8] = [XXS.index[levels] for levels in points]
        words[j] = sum((bits & 0x7F) << 7 * k for k, bits in enumerate(signs))
    if not max(scales) > 0:
        return np.zeros(98, np.uint8)
    d, codes = scale_codes(scales)
    words |= np.array(codes, np.uint32) << 28
    return np.concatenate([half_bytes(d * f32(1.0125)), indices, words.view(np.uint8)])


def dequantize_iq3_xxs(data: Bytes) -> Row:
    def block(b: Bytes) -> list[f32]:
        d = from_half(b[:2].view("<u2")[0])
        values = []
        for j, word in enumerate(b[66:98].view("<u4")):
            scale = d * (f32(0.5) + int(word >> 28)) * f32(0.5)
            for k in range(4):
                bits = int(word) >> 7 * k & 0x7F
                bits |= bits.bit_count() % 2 << 7
                at = 2 + 8 * j + 2 * k
                levels = XXS.levels[b[at]] + XXS.levels[b[at + 1]]
                values += signed(scale, [62 if level == 7 else 4 * (2 * level + 1) for level in levels], bits)
        return values

    return decode(data, 98, block)


def signed(scale: f32, magnitudes: list[int], bits: int) -> list[f32]:
    return [-(scale * m) if bits >> i & 1 else scale * m for i, m in enumerate(magnitudes)]


# ---- IQ3_S


def quantize_iq3_s(row: Row, importances: Row | None) -> Bytes:
    with np.errstate(all="ignore"):
        return np.concatenate([block_s(*parts) for parts in blocks_of(row, importances)])


def block_s(x: Row, w: list[f32]) -> Bytes:
    """Return the bytes of a block. Groups without a value leave no gap in `low` and `signs`."""
    scales = [f32(0)] * 8
    low: list[int] = []
    all_signs: list[int] = []
    high = np.zeros(8, np.uint8)
    for j, group in enumerate(groups_of(x, 32)):
        weights = w[32 * j : 32 * j + 32]
        magnitudes, signs = take_signs(group, weights, even=False)
        if max(magnitudes) == 0:
            continue
        scale, points = fit_group(magnitudes, weights, S, 9, again_all=True)
        if scale < 0:
            scale, signs = -scale, [~bits for bits in signs]
        scales[j] = scale
        indices = [S.index[levels] for levels in points]
        low += [index & 0xFF for index in indices]
        high[j] = sum(index >> 8 << k for k, index in enumerate(indices))
        all_signs += [bits & 0xFF for bits in signs]
    d, codes = scale_codes(scales) if max(scales) > 0 else (f32(0), [0] * 8)
    return np.concatenate(
        [
            half_bytes(d * f32(1.033)),
            np.array(low + [0] * (64 - len(low)), np.uint8),
            high,
            np.array(all_signs + [0] * (32 - len(all_signs)), np.uint8),
            np.array([codes[2 * k] | codes[2 * k + 1] << 4 for k in range(4)], np.uint8),
        ]
    )


def dequantize_iq3_s(data: Bytes) -> Row:
    def block(b: Bytes) -> list[f32]:
        d = from_half(b[:2].view("<u2")[0])
        values = []
        for k in range(64):
            code = int(b[106 + k // 16]) >> 4 * (k // 8 % 2) & 0xF
            levels = S.levels[int(b[2 + k]) | (int(b[66 + k // 8]) >> k % 8 & 1) << 8]
            bits = int(b[74 + k // 2]) >> 4 * (k % 2)
            values += signed(d * (2 * code + 1), [2 * level + 1 for level in levels], bits)
        return values

    return decode(data, 110, block)
