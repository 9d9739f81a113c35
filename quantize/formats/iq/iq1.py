"""What IQ1_S and IQ1_M share: levels -1, 0, 1 with a shift, cuts through sorted weights, points of a grid.

A weight is scale * (code - 1 + shift), code in 0 .. 2, shift 1/8 or -1/8. The codes of a group of 8 are a
point of the grid IQ1. Which codes are best for a sub-block, regardless of the grid, is searched exhaustively:
codes that fit best grow with the weights, so two cuts through the sorted weights make them. The first of
equally good cuts wins, and sums run through the weights in sorted order.

ggml sorts with qsort, where the order of equal weights decides which importances are summed first. In glibc
qsort merges and so keeps equals in order; so do we. A ggml on a C library whose qsort does not (musl,
macOS, Windows) gives other bytes for blocks that hold a value twice.

Groups off the grid move to a neighbour (iq1_search), then the scale is fitted again.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from quantize.formats.iq import grids
from quantize.formats.iq.grids.neighbours import NOWHERE
from quantize.formats.iq.iq1_search import CODE_BITS, GROUP, PointTables, nearest_points
from quantize.simd.constants import HALF, INFINITY, ONE, ZERO
from quantize.simd.kernel import inlinable
from quantize.simd.lane_memory import FloatTile, IntTile, gather, pick, tail
from quantize.simd.lanes import Floats, Ints, Mask, absolute, maximum, select, splat, to_float
from quantize.simd.rounding import clamp, nearest_int

SCALE_TOP = np.float32(15)
"""The divisor of the largest scale: codes 0 .. 7 stand for 1, 3 .. 15."""

PLUS_LOW, PLUS_MIDDLE, PLUS_HIGH = np.float32(-0.875), np.float32(0.125), np.float32(1.125)
MINUS_LOW, MINUS_MIDDLE, MINUS_HIGH = np.float32(-1.125), np.float32(-0.125), np.float32(0.875)
"""The values of codes 0, 1, 2 in units of the scale, with either shift."""

WORST = np.float32(-3.4028234663852886e38)
NO_CUT = -1

_SHIFT = np.float32(0.125)


class Groups(NamedTuple):
    """The groups of a sub-block on their way to the grid: Tiles."""

    x: FloatTile
    weights: FloatTile
    lows: FloatTile  # what code 0 stands for in each group, PLUS_LOW or MINUS_LOW
    codes: IntTile  # the best code of each element, 0 .. 2
    points: IntTile  # the code of each group's grid point


@inlinable
def largest_magnitude(x: FloatTile, size: int) -> Floats:
    largest = absolute(x[0])
    for i in range(1, size):
        largest = maximum(largest, absolute(x[i]))
    return largest


@inlinable
def level(point: Ints, i: int, low: Floats) -> Floats:
    """Return what element i of a point stands for, in scales; `low` is what code 0 stands for."""
    return to_float(point >> CODE_BITS * i & 3) + low


@inlinable
def codes_of_cuts(
    x: FloatTile,
    keys: FloatTile,
    order: IntTile,
    size: int,
    first: Ints,
    second: Ints,
    flip: Mask,
    codes: IntTile,
) -> None:
    """Fill codes, Ints: 0 for the `first` smallest of x, 1 up to the `second` smallest, 2 beyond, or 2, 1, 0.

    keys, order  x sorted and where they came from, Tiles of size + 1
    """
    keys[size], order[size] = splat(INFINITY), splat(size)
    first_key, first_order = pick(keys, first), pick(order, first)
    second_key, second_order = pick(keys, second), pick(order, second)
    for i in range(size):
        below_first = (x[i] < first_key) | ((x[i] == first_key) & (first_order > i))
        below_second = (x[i] < second_key) | ((x[i] == second_key) & (second_order > i))
        code = select(below_second, select(below_first, splat(0), 1), 2)
        codes[i] = select(flip, 2 - code, code)


@inlinable
def code_groups(
    grid: PointTables, groups: Groups, size: int, active: Mask, scale: Floats
) -> tuple[Floats, Mask]:
    """Return the scale and where there is none; fill the points of the groups.

    active  lanes with something to code; the others get the first point, whose code is 0, and scale 0
    """
    x, weights, lows, codes, points = groups
    failed = ~(active | ~active)
    moved = failed
    sum_xq = splat(ZERO)
    sum_qq = splat(ZERO)
    for k in range(size // GROUP):
        start = GROUP * k
        number = splat(0)
        for i in range(GROUP - 1, -1, -1):
            number = number * 3 + codes[start + i]
        entries = select(active, gather(grid.entries, number), 0)
        moved |= entries < 0
        group, group_weights = tail(x, start), tail(weights, start)
        points[k] = nearest_points(grid, group, group_weights, lows[k], scale, tail(codes, start), entries)
        failed |= points[k] == NOWHERE
        points[k] = points[k] & 0xFFFF
        for i in range(GROUP):
            value = level(points[k], i, lows[k])
            weighted = group_weights[i] * value
            sum_xq += weighted * group[i]
            sum_qq += weighted * value
    scale = select(moved & (sum_xq > ZERO) & (sum_qq > ZERO), sum_xq / sum_qq, scale)
    failed |= ~(scale >= ZERO)
    return select(active, scale, ZERO), active & failed


def point_values() -> npt.NDArray[np.float32]:
    """Return -1, 0 or 1 for each of the 8 elements of each grid point, float32 (n_points * 8,)."""
    return grids.IQ1.points.astype(np.float32).reshape(-1)


@inlinable
def decode_group(
    values: npt.NDArray[np.float32],
    index: int | np.int32,
    minus: int | np.int32,
    scale: np.float32,
    rows: npt.NDArray[np.float32],
    start: int,
) -> None:
    """Fill rows[start : start + 8] with a group; minus is not 0 if its shift is -1/8."""
    shift = -_SHIFT if minus else _SHIFT
    for i in range(GROUP):
        rows[start + i] = scale * (values[GROUP * index + i] + shift)


@inlinable
def code_scales(scales: FloatTile, count: int, codes: IntTile) -> tuple[Floats, Mask]:
    """Return the scale of scales and where all scales are 0; fill `codes`, Ints 0 .. 7."""
    largest = splat(ZERO)
    for j in range(count):
        largest = maximum(largest, scales[j])
    nothing = largest == ZERO
    d = largest / SCALE_TOP
    inverse = ONE / d
    for j in range(count):
        code = clamp(nearest_int(HALF * (inverse * scales[j] - ONE)), 0, 7)
        codes[j] = select(nothing, 0, code)
    return select(nothing, ZERO, d), nothing
