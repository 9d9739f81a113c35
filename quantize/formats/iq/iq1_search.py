"""Search of IQ1_S and IQ1_M: levels -1, 0, 1 with a shift, cuts through sorted weights, points of a grid.

A weight is scale * (code - 1 + shift), code in 0 .. 2, shift 1/8 or -1/8. The codes of a group of 8 are a
point of the grid IQ1. Which codes are best for a sub-block, regardless of the grid, is searched exhaustively:
codes that fit best grow with the weights, so two cuts through the sorted weights make them. The first of
equally good cuts wins, and sums run through the weights in sorted order.

ggml sorts with qsort, where the order of equal weights decides which importances are summed first. In glibc
qsort merges and so keeps equals in order; so do we. A ggml on a C library whose qsort does not (musl,
macOS, Windows) gives other bytes for blocks that hold a value twice.

Groups off the grid move to a neighbour, then the scale is fitted again. The search finds the best neighbour
of a point, without looking at those that can't win. Neighbours are listed from near to far. What a far one
costs at least follows from the errors of the levels: it differs from the point in several elements, and in
each of them its error is larger by at least the regret, the error of the best other level less that of the
point's. One group in five has to look beyond its first 16 neighbours; on average there are 100 of them.

Rounding. With u = 2**-24, errors of levels are off by 3 u of themselves, their sum by 11 u, and a bound, made
of sums and differences of them, by less than 30 u of the point's error and the added regrets together. The
margin is 256 u. An infinite error makes bounds NaN, which rule out nothing.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from quantize.formats.iq import grids
from quantize.formats.iq.grids import COUNT_BITS, NOWHERE, tables
from quantize.simd.floats import INFINITY, ONE, TWO, ZERO
from quantize.simd.kernel import inlinable, inlined
from quantize.simd.lane_items import item, least, look_up, lowest_bit, mask_word, put_item
from quantize.simd.lane_memory import FloatTile, IntTile, float_tile, gather, int_tile, load, pick, tail
from quantize.simd.lanes import (
    LANES,
    Floats,
    Ints,
    Mask,
    absolute,
    lane_numbers,
    maximum,
    minimum,
    select,
    splat,
    to_float,
)

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
    """Return the value of element i of a point, in scales; `low` is the value of code 0."""
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


GROUP = 8
CODE_BITS = 2
FARTHEST = 4
"""The largest squared distance between a point and one of its neighbours."""

_LARGEST = np.float32(3.4028234663852886e38)
_MARGIN = np.float32(2.0**-16)
_LEAST_MARGIN = np.float32(1e-40)
_LAST = 0x7FFFFFFF


class PointTables(NamedTuple):
    """The GridTables of IQ1, and how far each LANES neighbours of `lists` are, at least: uint8."""

    entries: npt.NDArray[np.int32]
    lists: npt.NDArray[np.uint16]
    indices: npt.NDArray[np.int32]
    distances: npt.NDArray[np.uint8]


@cache
def point_tables() -> PointTables:
    """Return the tables."""
    grid, found = grids.IQ1, tables(grids.IQ1)
    numbers = np.flatnonzero(found.entries < 0)  # lists are in this order
    owners = grid.levels_of(np.repeat(numbers, ~found.entries[numbers] & (1 << COUNT_BITS) - 1))
    nearest = found.lists[::LANES, None] >> CODE_BITS * np.arange(GROUP, dtype=np.uint16) & 3
    distances = ((nearest.astype(np.int64) - owners) ** 2).sum(axis=1)
    return PointTables(*found, distances.astype(np.uint8))


@inlined
def nearest_points(
    found: PointTables,
    x: FloatTile,
    weights: FloatTile,
    low: Floats,
    scale: Floats,
    codes: IntTile,
    entries: Ints,
) -> Ints:
    """Return codes of grid points: of a lane's own point if it is on the grid, else of its best neighbour.

    Best is the least sum of weight * (scale * level - x)**2, the first of equals; NOWHERE if none is below
    the largest float32. ggml's iq1_find_best_neighbour2.

    x, weights, codes  Tiles of 8: what to code, and the point's codes
    low                what code 0 stands for, in scales
    entries            PointTables.entries of the points; any code for a lane that must not be searched
    """
    points, lows, scales, bounds = int_tile(1), float_tile(1), float_tile(1), float_tile(5)
    points[0] = entries
    pending = mask_word(entries < 0)
    if pending != 0:
        lows[0], scales[0] = low, scale
        _bound(x, weights, low, scale, codes, bounds)
    while pending != 0:
        lane = lowest_bit(pending)
        pending &= pending - 1
        scaled = (to_float(lane_numbers() & 3) + item(lows, 0, lane)) * item(scales, 0, lane)
        best = _best_neighbour(found, scaled, x, weights, bounds, lane, ~item(points, 0, lane))
        put_item(points, 0, lane, np.int32(best))
    return points[0]


@inlined
def _bound(
    x: FloatTile, weights: FloatTile, low: Floats, scale: Floats, codes: IntTile, bounds: FloatTile
) -> None:
    """Fill bounds[d], Floats, with what a neighbour at a squared distance of d or more costs at least."""
    own = splat(ZERO)
    gained = splat(ZERO)
    two_steps = splat(_LARGEST)
    regrets = float_tile(FARTHEST)  # the smallest ones, ascending
    for k in range(FARTHEST):
        regrets[k] = splat(_LARGEST)
    level_0, level_1, level_2 = scale * low, scale * (low + ONE), scale * (low + TWO)
    for i in range(GROUP):
        error_0 = _error(level_0, x[i], weights[i])
        error_1 = _error(level_1, x[i], weights[i])
        error_2 = _error(level_2, x[i], weights[i])
        is_0, is_1 = codes[i] == 0, codes[i] == 1
        error = select(is_0, error_0, select(is_1, error_1, error_2))
        opposite = select(is_0, error_2, error_0)
        regret = minimum(opposite, select(is_1, error_2, error_1)) - error
        own += error
        gained += minimum(regret, ZERO)
        two_steps = minimum(two_steps, select(is_1, _LARGEST, maximum(opposite - error, ZERO)))
        rest = maximum(regret, ZERO)
        for k in range(FARTHEST):
            smaller = minimum(regrets[k], rest)
            rest = maximum(regrets[k], rest)
            regrets[k] = smaller
    total = splat(ZERO)
    for d in range(1, FARTHEST + 1):
        total += regrets[d - 1]
        added = minimum(total, two_steps)
        bounds[d] = own + gained + added - ((own + added) * _MARGIN + _LEAST_MARGIN)


@inlined
def _error(level: Floats, x: Floats, weight: Floats) -> Floats:
    difference = level - x
    return difference * weight * difference


@inlined
def _best_neighbour(
    found: PointTables,
    scaled: Floats,
    x: FloatTile,
    weights: FloatTile,
    bounds: FloatTile,
    lane: int,
    place: int,
) -> int:
    """Return the code of the best neighbour of one lane, whose list is at `place`; or NOWHERE.

    scaled  scale * level by code, twice, as `look_up` sees 3 bits of a code
    """
    errors = float_tile(GROUP)
    for i in range(GROUP):
        errors[i] = _error(scaled, splat(item(x, i, lane)), splat(item(weights, i, lane)))
    best, positions = splat(_LARGEST), splat(0)
    chunk = place >> COUNT_BITS
    end = chunk + (place & (1 << COUNT_BITS) - 1)
    while True:
        codes = load(found.lists, chunk * LANES)
        total = look_up(errors[0], codes)
        for i in range(1, GROUP):
            total += look_up(errors[i], codes >> CODE_BITS * i)
        closer = total < best
        best = select(closer, total, best)
        positions = select(closer, chunk * LANES, positions)
        shortest = least(best)
        chunk += 1
        if chunk == end or shortest < item(bounds, found.distances[chunk], lane):
            break
    if not shortest < _LARGEST:
        return NOWHERE
    return found.lists[least(select(best == shortest, positions + lane_numbers(), _LAST))]
