"""The search off the grid IQ1: the best neighbour of a point, without looking at those that can't win.

Neighbours are listed from near to far. What a far one costs at least follows from the errors of the levels:
it differs from the point in several elements, and in each of them its error is larger by at least the
regret, the error of the best other level less that of the point's. One group in five has to look beyond
its first 16 neighbours; on average there are 100 of them.

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
from quantize.formats.iq.grids.neighbours import COUNT_BITS, NOWHERE, tables
from quantize.simd.constants import ONE, TWO, ZERO
from quantize.simd.kernel import inlined
from quantize.simd.lane_items import item, least, look_up, lowest_bit, mask_word, put_item
from quantize.simd.lane_memory import FloatTile, IntTile, float_tile, int_tile, load
from quantize.simd.lanes import LANES, Floats, Ints, lane_numbers, maximum, minimum, select, splat, to_float

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
