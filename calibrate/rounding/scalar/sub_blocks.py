"""One sub-block of LANES rows: which line and which levels cost least, with feedback from weight to weight.

A sub-block is tried under every candidate line: each weight takes the level next to it, its error is taken
off the weights after it, and the line with the least sum of squared errors wins. Rows are lanes, so that each
number of the factor is read once for all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from calibrate.rounding.base import PANEL
from quantize.formats.base import Floats32
from quantize.simd.kernel import inlinable
from quantize.simd.lane_memory import FloatTile, beside, float_tile, load, tail, tile_like, zero_like
from quantize.simd.lanes import Floats, Ints, select, splat, to_int
from quantize.simd.rounding import nearest_float

MOST_CANDIDATES = 64

ZERO = np.float32(0)
ONE = np.float32(1)
HALF = np.float32(0.5)


class Choice(NamedTuple):
    """The best line of a sub-block.

    number      of the candidate
    cost        sum of squared errors
    slope, low  a value is slope * level - low
    """

    number: Ints
    cost: Floats
    slope: Floats
    low: Floats


@inlinable
def _nearest_of_even(value: Floats, levels: Floats32) -> Floats:
    return nearest_float(value, int(levels[0]), int(levels[levels.size - 1]))


@inlinable
def _nearest_of_any(value: Floats, levels: Floats32) -> Floats:
    nearest = value * ZERO + levels[0]
    for k in range(1, levels.size):
        nearest = select(value < HALF * (levels[k - 1] + levels[k]), nearest, levels[k])
    return nearest


@inlinable
def code_of_even(level: Floats, levels: Floats32) -> Ints:
    """Return the numbers of levels that are successive integers."""
    return to_int(level) - int(levels[0])


@inlinable
def code_of_any(level: Floats, levels: Floats32) -> Ints:
    """Return the numbers of levels."""
    code = splat(0)
    for k in range(1, levels.size):
        code = select(level < levels[k], code, k)
    return code


def _choosing(nearest: Callable[..., Any]) -> Any:
    """Return what chooses a line, given how a value becomes a level.

    choose(x, upper, inverses, n, start, sub_elems, levels, slopes, lows, at, step, n_candidates,
           errors, chosen) -> Choice

    x             Tile of the sub-block's weights
    upper         (n * n,), of the factor; the sub-block begins in row and column `start`
    inverses      (n,), 1 / the diagonal of upper
    slopes, lows  the candidates, an even number up to MOST_CANDIDATES: candidate c at index at + c * step
    errors        Tile that gets the errors of the choice
    chosen        Tile that gets its levels
    """

    @inlinable
    def round_under(
        x: FloatTile,
        slope: Floats,
        low: Floats,
        upper: Floats32,
        inverses: Floats32,
        n: int,
        start: int,
        sub_elems: int,
        levels: Floats32,
        errors: FloatTile,
        chosen: FloatTile,
    ) -> Floats:
        """Return what a sub-block costs under one line, and fill its errors and levels."""
        inverse_slope = select(slope == ZERO, ZERO, ONE / slope)
        for i in range(sub_elems):
            errors[i] = x[i]
        cost = zero_like(x)
        for i in range(sub_elems):
            level = nearest((errors[i] + low) * inverse_slope, levels)
            error = (errors[i] - (slope * level - low)) * inverses[start + i]
            cost += error * error
            chosen[i] = level
            errors[i] = error
            for k in range(i + 1, sub_elems):
                errors[k] = errors[k] - error * upper[(start + i) * n + start + k]
        return cost

    @inlinable
    def choose(
        x: FloatTile,
        upper: Floats32,
        inverses: Floats32,
        n: int,
        start: int,
        sub_elems: int,
        levels: Floats32,
        slopes: Floats32,
        lows: Floats32,
        at: int,
        step: int,
        n_candidates: int,
        errors: FloatTile,
        chosen: FloatTile,
    ) -> Choice:
        slope_of, low_of = float_tile(MOST_CANDIDATES), float_tile(MOST_CANDIDATES)
        costs = float_tile(MOST_CANDIDATES)
        twice = beside(x, 0)
        both_errors, both_chosen = tile_like(twice, PANEL), tile_like(twice, PANEL)
        for c in range(n_candidates):
            slope_of[c] = load(slopes, at + c * step)
            low_of[c] = load(lows, at + c * step)
        for c in range(0, n_candidates, 2):
            both_slopes, both_lows = beside(tail(slope_of, c), 1)[0], beside(tail(low_of, c), 1)[0]
            beside(tail(costs, c), 1)[0] = round_under(
                twice,
                both_slopes,
                both_lows,
                upper,
                inverses,
                n,
                start,
                sub_elems,
                levels,
                both_errors,
                both_chosen,
            )
        number = splat(0)
        cost, slope, low = costs[0], slope_of[0], low_of[0]
        for c in range(1, n_candidates):
            better = costs[c] < cost
            number = select(better, c, number)
            cost = select(better, costs[c], cost)
            slope = select(better, slope_of[c], slope)
            low = select(better, low_of[c], low)
        round_under(x, slope, low, upper, inverses, n, start, sub_elems, levels, errors, chosen)
        return Choice(number, cost, slope, low)

    return choose


choose_evenly = _choosing(_nearest_of_even)
"""The choice where levels are successive integers."""
choose_unevenly = _choosing(_nearest_of_any)
"""The choice for any levels."""
