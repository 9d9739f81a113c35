"""Twins of IQ2_XXS, IQ2_XS and IQ2_S: 256 values a block, in groups of 8 whose magnitudes are a grid point.

Block layouts, in bytes:

  IQ2_XXS  d | 8 times: 4 indices, 4 bytes of 4 * 7 signs and a scale      groups share a scale by four
  IQ2_XS   d | 32 times 16 bits: 9 of index, 7 signs | 8 of scales         groups share a scale by two
  IQ2_S    d | 32 low bytes of indices | 32 of 8 signs | 8 of high bits of indices | 8 of scales

A level 0, 1, 2 stands for 1, 3, 5 in the search and for 8, 25, 43 in the decoder. With 7 signs, the eighth
makes their count even.
"""

from __future__ import annotations

from functools import cache
from itertools import product

import numpy as np
import numpy.typing as npt

from quantize.formats.iq import grids
from tests.naive.floats import clamp, f32, from_half, nearest, to_half
from tests.naive.searches import importance_weights, positive_scale, sum_of_squares

Row = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]
Levels = tuple[int, ...]

FARTHEST = np.finfo(np.float32).max
SIGN_COUNTS = {grids.IQ2_XXS: 7, grids.IQ2_XS: 7, grids.IQ2_S: 8}


class NoNeighbour(Exception):
    """The reference aborts: no neighbour is at a finite distance."""


@cache
def points(grid: grids.Grid) -> dict[Levels, int]:
    """Return the grid: levels -> index."""
    return {tuple(map(int, levels)): index for index, levels in enumerate(grid.levels)}


@cache
def neighbours(grid: grids.Grid, wanted: Levels) -> list[Levels]:
    """Return the grid points in the nearest shells around a point off the grid, nearest first."""

    def distance(levels: Levels) -> int:
        return sum((a - b) ** 2 for a, b in zip(levels, wanted, strict=True))

    ordered = sorted(points(grid), key=lambda levels: (distance(levels), points(grid)[levels]))
    shells = sorted({distance(levels) for levels in ordered})[: grid.shells]
    return [levels for levels in ordered if distance(levels) in shells]


def split_signs(x: Row, weights: list[f32], stored: int) -> tuple[list[f32], int]:
    """Return magnitudes and sign bits of 8 values; for 7 stored signs an odd count is evened out."""
    signs = sum(1 << i for i, value in enumerate(x) if not value >= 0)
    magnitudes = [value if value >= 0 else -value for value in x]
    if stored == 7 and signs.bit_count() % 2:
        costs = [weight * value * value for weight, value in zip(weights, x, strict=True)]
        cheapest = 0
        for i, cost in enumerate(costs):
            if cost < costs[cheapest]:
                cheapest = i
        magnitudes[cheapest] = -magnitudes[cheapest]
        signs ^= 1 << cheapest
    return magnitudes, signs & (1 << stored) - 1


def nearest_point(
    grid: grids.Grid, x: list[f32], weights: list[f32], inverse: f32, scale: f32
) -> tuple[Levels, bool]:
    """Return the levels of 8 magnitudes, and whether they had to be moved to a neighbour on the grid.

    Neighbours are weighed by the square roots of the weights; the first of the best wins.
    """
    half = f32(0.5)
    levels = tuple(clamp(nearest(half * (inverse * value - 1)), 0, 2) for value in x)
    if levels in points(grid):
        return levels, False
    best, shortest = None, FARTHEST
    for candidate in neighbours(grid, levels):
        distance = f32(0)
        for value, weight, level in zip(x, weights, candidate, strict=True):
            difference = scale * (2 * level + 1) - value
            distance += np.sqrt(weight) * difference * difference
        if distance < shortest:
            best, shortest = candidate, distance
    if best is None:
        raise NoNeighbour
    return best, True


def groups_of(values: list[f32]) -> list[list[f32]]:
    return [values[start : start + 8] for start in range(0, len(values), 8)]


def fit(x: list[f32], weights: list[f32], levels: list[Levels]) -> tuple[f32, f32]:
    """Return the sums of weight * x * value and of weight * value**2."""
    sum_xv = sum_vv = f32(0)
    for value, weight, level in zip(x, weights, [each for group in levels for each in group], strict=True):
        sum_xv += weight * value * (2 * level + 1)
        sum_vv += weight * (2 * level + 1) * (2 * level + 1)
    return sum_xv, sum_vv


def search(
    grid: grids.Grid, x: list[f32], weights: list[f32], top: f32, scale: f32, reach: int, redo_all: bool
) -> tuple[f32, list[Levels]]:
    """Return a scale, negative at times, and the levels of each group.

    Candidates give `top` the value 5, more or less; afterwards groups off the grid (or all) are redone with
    the winning scale.
    """
    pairs = list(zip(groups_of(x), groups_of(weights), strict=True))
    chosen = [((0,) * 8, redo_all)] * len(pairs)
    gain = f32(0)
    for step in range(-reach, reach + 1):
        inverse = (5 + step * f32(0.1)) / top
        tried = [nearest_point(grid, *pair, inverse, 1 / inverse) for pair in pairs]
        sum_xv, sum_vv = fit(x, weights, [levels for levels, _ in tried])
        if sum_vv > 0 and sum_xv * sum_xv > gain * sum_vv:
            scale = sum_xv / sum_vv
            gain = scale * sum_xv
            chosen = [(levels, moved or redo_all) for levels, moved in tried]
    levels = [each for each, _ in chosen]
    if scale > 0 and any(again for _, again in chosen):
        levels = [
            nearest_point(grid, *pair, 1 / scale, scale)[0] if again else old
            for pair, (old, again) in zip(pairs, chosen, strict=True)
        ]
        sum_xv, sum_vv = fit(x, weights, levels)
        if sum_vv > 0:
            scale = sum_xv / sum_vv
    return scale, levels


def encode_sub_block(grid: grids.Grid, x: Row, weights: list[f32]) -> tuple[f32, list[int], list[int]]:
    """Return scale, indices and signs."""
    stored = SIGN_COUNTS[grid]
    split = [split_signs(x[k : k + 8], weights[k : k + 8], stored) for k in range(0, len(x), 8)]
    magnitudes = [value for group, _ in split for value in group]
    signs = [bits for _, bits in split]
    nothing = f32(0), [0] * len(split), [0] * len(split)
    largest = max(magnitudes)
    if largest < (f32(1e-8) if grid is grids.IQ2_S else f32(1e-15)):
        return nothing
    if grid is grids.IQ2_XXS:
        scale, _ = positive_scale(magnitudes, weights, 4)
        if scale * 3 <= 0:
            return nothing
        scale, levels = search(grid, magnitudes, weights, scale * 3, scale, 6, redo_all=True)
    else:
        scale, levels = search(grid, magnitudes, weights, largest, largest / 5, 9, redo_all=False)
    if scale < 0:
        scale, signs = -scale, [bits ^ (1 << stored) - 1 for bits in signs]
    return scale, [points(grid)[each] for each in levels], signs


def encode_block(
    grid: grids.Grid, x: Row, importances: Row | None, size: int
) -> tuple[f32, list[int], list[int], list[int]]:
    """Return the scale of scales, and the codes of scales, the indices and the signs of 256 values."""
    spread = (2 if grid is grids.IQ2_S else 1) * sum_of_squares(x) / f32(256)
    scales: list[f32] = []
    indices: list[int] = []
    signs: list[int] = []
    for start in range(0, 256, size):
        part = x[start : start + size]
        if importances is None:
            weights = [f32(0.25) * spread + value * value for value in part]
        else:
            weights = importance_weights(part, importances[start : start + size], spread)
        scale, more_indices, more_signs = encode_sub_block(grid, part, weights)
        scales.append(scale)
        indices += more_indices
        signs += more_signs
    largest = max(scales)
    if largest == 0:
        empty = [0] * 32
        return f32(0), [0] * len(scales), *((indices, signs) if grid is grids.IQ2_S else (empty, empty))
    d = largest / 31
    inverse = 1 / d
    codes = [clamp(nearest(f32(0.5) * (inverse * scale - 1)), 0, 15) for scale in scales]
    return d, codes, indices, signs


def nibbles(codes: list[int]) -> list[int]:
    return [low | high << 4 for low, high in zip(codes[::2], codes[1::2], strict=True)]


def half_bytes(value: f32) -> Bytes:
    return np.array([to_half(value)], "<u2").view(np.uint8)


def blocks_of(row: Row, importances: Row | None) -> list[tuple[Row, Row | None]]:
    starts = range(0, len(row), 256)
    return [(row[s : s + 256], None if importances is None else importances[s : s + 256]) for s in starts]


def quantize_iq2_xxs(row: Row, importances: Row | None) -> Bytes:
    def block(x: Row, importances: Row | None) -> Bytes:
        d, codes, indices, signs = encode_block(grids.IQ2_XXS, x, importances, 32)
        words = [
            sum(signs[4 * j + k] << 7 * k for k in range(4)) | code << 28 for j, code in enumerate(codes)
        ]
        fields = [
            np.concatenate(
                [np.array(indices[4 * j : 4 * j + 4], np.uint8), np.array([word], "<u4").view("u1")]
            )
            for j, word in enumerate(words)
        ]
        return np.concatenate([half_bytes(d), *fields])

    with np.errstate(all="ignore"):
        return np.concatenate([block(*pair) for pair in blocks_of(row, importances)])


def quantize_iq2_xs(row: Row, importances: Row | None) -> Bytes:
    def block(x: Row, importances: Row | None) -> Bytes:
        d, codes, indices, signs = encode_block(grids.IQ2_XS, x, importances, 16)
        words = np.array([index | bits << 9 for index, bits in zip(indices, signs, strict=True)], "<u2")
        return np.concatenate([half_bytes(d), words.view(np.uint8), np.array(nibbles(codes), np.uint8)])

    with np.errstate(all="ignore"):
        return np.concatenate([block(*pair) for pair in blocks_of(row, importances)])


def quantize_iq2_s(row: Row, importances: Row | None) -> Bytes:
    def block(x: Row, importances: Row | None) -> Bytes:
        d, codes, indices, signs = encode_block(grids.IQ2_S, x, importances, 16)
        low = [index & 0xFF for index in indices]
        high = [sum(indices[4 * j + k] >> 8 << 2 * k for k in range(4)) for j in range(8)]
        stored = half_bytes(d * f32(0.9875))
        return np.concatenate([stored, np.array(low + signs + high + nibbles(codes), np.uint8)])

    with np.errstate(all="ignore"):
        return np.concatenate([block(*pair) for pair in blocks_of(row, importances)])


def decode_groups(
    grid: grids.Grid, half: int, codes: list[int], indices: list[int], signs: list[int]
) -> list[f32]:
    values = []
    per_scale = len(indices) // len(codes)
    for k, (index, bits) in enumerate(zip(indices, signs, strict=True)):
        if SIGN_COUNTS[grid] == 7:
            bits |= bits.bit_count() % 2 << 7
        scale = from_half(half) * (f32(0.5) + codes[k // per_scale]) * f32(0.25)
        for i in range(8):
            value = scale * f32(grid.points[index][i])
            values.append(-value if bits >> i & 1 else value)
    return values


def scale_codes(data: Bytes) -> list[int]:
    return [int(byte) >> shift & 0xF for byte, shift in product(data, (0, 4))]


def dequantize_iq2_xxs(data: Bytes) -> Row:
    values: list[f32] = []
    for block in data.reshape(-1, 66):
        fields = block[2:].reshape(8, 8)
        words = [int(field[4:].view("<u4")[0]) for field in fields]
        indices = [int(index) for field in fields for index in field[:4]]
        signs = [word >> 7 * k & 0x7F for word in words for k in range(4)]
        half = block[:2].view("<u2")[0]
        values += decode_groups(grids.IQ2_XXS, half, [word >> 28 for word in words], indices, signs)
    return np.array(values)


def dequantize_iq2_xs(data: Bytes) -> Row:
    values: list[f32] = []
    for block in data.reshape(-1, 74):
        words = [int(word) for word in block[2:66].view("<u2")]
        indices, signs = [word & 0x1FF for word in words], [word >> 9 for word in words]
        half = block[:2].view("<u2")[0]
        values += decode_groups(grids.IQ2_XS, half, scale_codes(block[66:]), indices, signs)
    return np.array(values)


def dequantize_iq2_s(data: Bytes) -> Row:
    values: list[f32] = []
    for block in data.reshape(-1, 82):
        high = [int(block[66 + k // 4]) >> 2 * (k % 4) & 3 for k in range(32)]
        indices = [int(low) | top << 8 for low, top in zip(block[2:34], high, strict=True)]
        signs = [int(bits) for bits in block[34:66]]
        half = block[:2].view("<u2")[0]
        values += decode_groups(grids.IQ2_S, half, scale_codes(block[74:]), indices, signs)
    return np.array(values)
