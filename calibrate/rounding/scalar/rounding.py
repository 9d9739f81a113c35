"""The kernel that rounds a block of columns, and how a sub-block of LANES rows chooses its line and levels.

A sub-block is tried under every candidate line: each weight takes the level next to it, its error is taken
off the weights after it, and the line with the least sum of squared errors wins. The errors of that choice
are taken off later sub-blocks. Rows are lanes, so each number of the factor is read once for all of them.
"""

from __future__ import annotations

from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt

from calibrate.rounding.base import PANEL
from quantize.formats.base import Floats32, as_source
from quantize.simd.floats import nearest_float
from quantize.simd.kernel import inlined, kernel
from quantize.simd.lane_memory import (
    FloatTile,
    beside,
    float_tile,
    int_tile,
    load,
    store,
    tail,
    tile_like,
    zero_like,
)
from quantize.simd.lanes import LANES, Floats, Ints, select, splat, to_int
from quantize.simd.packing import pack
from quantize.simd.tiles import load_blocks, store_blocks

MOST_CANDIDATES = 64

ZERO = np.float32(0)
ONE = np.float32(1)
HALF = np.float32(0.5)

WORDS = PANEL // 4


class Levels(NamedTuple):
    """What weights are rounded to. Kernels are compiled for either kind.

    values  float32, ascending
    ends    the lowest and the highest where they are successive integers, so that rounding needs no search;
            else None
    """

    values: Floats32
    ends: tuple[int, int] | None

    @classmethod
    def of(cls, values: Floats32) -> Self:
        """Find out whether levels are successive integers."""
        is_even = bool((np.diff(values) == 1).all())
        return cls(as_source(values), (int(values[0]), int(values[-1])) if is_even else None)


class Lines(NamedTuple):
    """The candidates of sub-blocks: a value is slope * level - low.

    slopes, lows  float32 (sub-blocks * n_lines * n_rows,)
    n_lines       of a sub-block, an even number up to MOST_CANDIDATES
    n_rows        a multiple of LANES
    """

    slopes: Floats32
    lows: Floats32
    n_lines: int
    n_rows: int


class Picks(NamedTuple):
    """What kernels fill.

    codes    (n_rows * n,), the number of each weight's level
    numbers  (sub-blocks * padded n_rows,), the candidate of each sub-block
    """

    codes: npt.NDArray[np.uint8]
    numbers: npt.NDArray[np.int32]


class Columns(NamedTuple):
    """The columns of a sub-block, in the factor that it is rounded under.

    upper     (n * n,), U
    inverses  1 / U[i, i]
    n         the factor's columns
    start     the first of the sub-block
    size      their number
    """

    upper: Floats32
    inverses: Floats32
    n: int
    start: int
    size: int


class Rounded(NamedTuple):
    """What becomes of a sub-block's weights: Tiles.

    errors  in units of U[i, i]
    levels  the level that each takes
    """

    errors: FloatTile
    levels: FloatTile


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


@inlined
def _nearest(value: Floats, levels: Floats32, ends: tuple[int, int] | None) -> Floats:
    """Find the level next to a value. numba drops the branch that the type of `ends` rules out."""
    if ends is None:
        nearest = value * ZERO + levels[0]
        for k in range(1, levels.size):
            nearest = select(value < HALF * (levels[k - 1] + levels[k]), nearest, levels[k])
        return nearest
    return nearest_float(value, ends[0], ends[1])


@inlined
def code_of(level: Floats, levels: Floats32, ends: tuple[int, int] | None) -> Ints:
    """Find the numbers of levels."""
    if ends is None:
        code = splat(0)
        for k in range(1, levels.size):
            code = select(level < levels[k], code, k)
        return code
    return to_int(level) - ends[0]


@inlined
def _round_under(
    x: FloatTile, columns: Columns, levels: Levels, slope: Floats, low: Floats, rounded: Rounded
) -> Floats:
    """Compute what a sub-block costs under one line, and fill its errors and levels."""
    errors, start, size = rounded.errors, columns.start, columns.size
    inverse_slope = select(slope == ZERO, ZERO, ONE / slope)
    for i in range(size):
        errors[i] = x[i]
    cost = zero_like(x)
    for i in range(size):
        level = _nearest((errors[i] + low) * inverse_slope, levels.values, levels.ends)
        error = (errors[i] - (slope * level - low)) * columns.inverses[start + i]
        cost += error * error
        rounded.levels[i] = level
        errors[i] = error
        for k in range(i + 1, size):
            errors[k] = errors[k] - error * columns.upper[(start + i) * columns.n + start + k]
    return cost


@inlined
def choose(x: FloatTile, columns: Columns, levels: Levels, lines: Lines, at: int, rounded: Rounded) -> Choice:
    """Choose the line under which a sub-block costs least, the first of several.

    x        Tile of its weights
    at       index of its first candidate in `lines`
    rounded  gets what comes of the choice
    """
    slopes, lows = float_tile(MOST_CANDIDATES), float_tile(MOST_CANDIDATES)
    costs = float_tile(MOST_CANDIDATES)
    twice = beside(x, 0)
    both = Rounded(tile_like(twice, PANEL), tile_like(twice, PANEL))
    for c in range(lines.n_lines):
        slopes[c] = load(lines.slopes, at + c * lines.n_rows)
        lows[c] = load(lines.lows, at + c * lines.n_rows)
    for c in range(0, lines.n_lines, 2):
        both_slopes, both_lows = beside(tail(slopes, c), 1)[0], beside(tail(lows, c), 1)[0]
        cost_of_both = _round_under(twice, columns, levels, both_slopes, both_lows, both)
        beside(tail(costs, c), 1)[0] = cost_of_both
    number = splat(0)
    cost, slope, low = costs[0], slopes[0], lows[0]
    for c in range(1, lines.n_lines):
        better = costs[c] < cost
        number = select(better, c, number)
        cost = select(better, costs[c], cost)
        slope = select(better, slopes[c], slope)
        low = select(better, lows[c], low)
    _round_under(x, columns, levels, slope, low, rounded)
    return Choice(number, cost, slope, low)


@inlined
def _carry_on(columns: Columns, errors: FloatTile, x: FloatTile) -> None:
    """Take a sub-block's errors off the columns after it."""
    n, start = columns.n, columns.start
    for k in range(start + columns.size, n):
        value = x[k]
        for i in range(columns.size):
            value -= errors[i] * columns.upper[(start + i) * n + k]
        x[k] = value


@kernel
def round_blocks(
    rows: Floats32, upper: Floats32, n: int, size: int, levels: Levels, lines: Lines, picks: Picks
) -> None:
    """Round a block of columns, sub-block after sub-block.

    rows   (n_rows * n,), n <= PANEL a multiple of LANES
    upper  (n * n,), of the factor
    size   columns of a sub-block
    picks  filled
    """
    x, rounded = float_tile(PANEL), Rounded(float_tile(PANEL), float_tile(PANEL))
    codes, words = int_tile(PANEL), int_tile(WORDS)
    inverses = np.empty(n, np.float32)
    for i in range(n):
        inverses[i] = ONE / upper[i * n + i]
    for first in range(0, rows.size // n, LANES):
        load_blocks(rows, first, n, x)
        for j in range(n // size):
            columns = Columns(upper, inverses, n, j * size, size)
            at = j * lines.n_lines * lines.n_rows + first
            choice = choose(tail(x, columns.start), columns, levels, lines, at, rounded)
            store(picks.numbers, j * lines.n_rows + first, choice.number)
            for i in range(size):
                codes[columns.start + i] = code_of(rounded.levels[i], levels.values, levels.ends)
            _carry_on(columns, rounded.errors, x)
        pack(codes, 0, 8, n, n, words)
        store_blocks(words, picks.codes, first, n)
