"""The rounder of a layout: scales as llama.cpp's search gives them, then the best of their neighbours.

A sub-block of LANES rows is tried under every candidate line: each weight takes the level next to it, its
error is taken off the weights after it, and the line with the least sum of squared errors wins. The errors of
that choice are taken off later sub-blocks. Rows are lanes, so each number of the factor is read once for all
of them.

Then sub-blocks are chosen anew, one after the other, with all other columns as they are. The pull of a row's
errors e on its columns is p = e H. With the other columns fixed, the best values of a sub-block would be
v + p H_jj^-1, H_jj its own moments, and what other values cost is measured from there. So choosing them is
rounding with feedback once more, by the factor of H_jj. The choice is taken where it costs less than v does,
and the pull follows. Scales of scales are fitted last.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt

from gguf_tools.format.ggml_types import GGMLType
from quantize.formats import get_format
from quantize.formats.base import Bytes, Floats32, as_source
from quantize.importances.weighting import ColumnWeights
from quantize.rounding.base import PANEL, Effort
from quantize.rounding.factor import Panel
from quantize.rounding.products import feed_back
from quantize.rounding.scalar.blocks import Codes, Integers, ScalarBlocks, ScalarLayout, as_half, chosen
from quantize.simd.floats import HALF, ONE, ZERO, nearest_float
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
from quantize.simd.tiles import load_blocks, store_blocks, store_columns

MOST_CANDIDATES = 64

WORDS = PANEL // 4


class Levels(NamedTuple):
    """Levels that weights are rounded to. Kernels are compiled for either kind.

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
    """Arrays that kernels fill.

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
    """Result of rounding a sub-block's weights: Tiles.

    errors  in units of U[i, i]
    levels  the level that each takes
    """

    errors: FloatTile
    levels: FloatTile


class BestLine(NamedTuple):
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
def choose(
    x: FloatTile, columns: Columns, levels: Levels, lines: Lines, at: int, rounded: Rounded
) -> BestLine:
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
    return BestLine(number, cost, slope, low)


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


_LEAST_GAIN = np.float32(1 - 1e-5)
"""The share of its cost below which a choice counts as better, so that rounding alone changes nothing."""

_SINGULAR = 1e-6
"""The share of the product of both variances below which scale and minimum can't be told apart."""


class ScalarGround(NamedTuple):
    """Costs of the columns of a block: flat arrays.

    hessian  (n * n,), their moments, n <= PANEL a multiple of LANES
    uppers   (n * size,), the factor of each sub-block's own moments
    n        columns of the block
    size     columns of a sub-block
    """

    hessian: Floats32
    uppers: Floats32
    n: int
    size: int


class ScalarState(NamedTuple):
    """State of a block of each row: (n_rows * n,) each.

    values  what the bytes decode to
    pulls   errors of whole rows times the moments; changed as the errors change
    moves   get the change of the values
    """

    values: Floats32
    pulls: Floats32
    moves: Floats32


@inlined
def _aim(columns: Columns, pulls: FloatTile, values: FloatTile, target: FloatTile) -> Floats:
    """Compute what a sub-block costs as it is; fill `target` with its best values."""
    upper, size = columns.upper, columns.size
    roots = float_tile(PANEL)
    cost = splat(ZERO)
    for i in range(size):
        root = splat(ZERO)
        for k in range(i, size):
            root += pulls[k] * upper[i * size + k]
        roots[i] = root
        cost += root * root
    for k in range(size):
        best = values[k]
        for i in range(k + 1):
            best += roots[i] * upper[i * size + k]
        target[k] = best
    return cost


@inlined
def _follow(hessian: Floats32, n: int, size: int, moves: FloatTile, pulls: FloatTile) -> None:
    """Change the pulls of a block as the values of a sub-block move.

    hessian  (size * n,), the rows of the sub-block: an index from 0 on takes LLVM no check of its sign
    """
    for k in range(n):
        pull = pulls[k]
        for i in range(size):
            pull -= moves[i] * hessian[i * n + k]
        pulls[k] = pull


@kernel
def refine_blocks(
    ground: ScalarGround, state: ScalarState, levels: Levels, lines: Lines, picks: Picks
) -> None:
    """Choose the sub-blocks of a block of columns anew.

    picks  filled: the number is -1 where a sub-block stays as it is, and its codes do not count
    """
    n, size = ground.n, ground.size
    pulls, values, moves = float_tile(PANEL), float_tile(PANEL), float_tile(PANEL)
    target, rounded = float_tile(PANEL), Rounded(float_tile(PANEL), float_tile(PANEL))
    codes, words = int_tile(PANEL), int_tile(WORDS)
    inverses = np.empty(n, np.float32)
    for i in range(n):
        inverses[i] = ONE / ground.uppers[i * size + i % size]
    for first in range(0, state.values.size // n, LANES):
        load_blocks(state.pulls, first, n, pulls)
        load_blocks(state.values, first, n, values)
        for j in range(n // size):
            start = j * size
            own = ground.uppers[start * size : (start + size) * size]
            columns = Columns(own, inverses[start:], size, 0, size)
            cost = _aim(columns, tail(pulls, start), tail(values, start), target)
            at = j * lines.n_lines * lines.n_rows + first
            choice = choose(target, columns, levels, lines, at, rounded)
            better = choice.cost < cost * _LEAST_GAIN
            store(picks.numbers, j * lines.n_rows + first, select(better, choice.number, -1))
            for i in range(size):
                new = choice.slope * rounded.levels[i] - choice.low
                codes[start + i] = code_of(rounded.levels[i], levels.values, levels.ends)
                moves[start + i] = select(better, new - values[start + i], ZERO)
            _follow(ground.hessian[start * n : (start + size) * n], n, size, tail(moves, start), pulls)
        pack(codes, 0, 8, n, n, words)
        store_blocks(words, picks.codes, first, n)
        store_columns(moves, n, first, 0, n, state.moves)
        store_columns(pulls, n, first, 0, n, state.pulls)


# ---- scales of scales


def refit(layout: ScalarLayout, blocks: ScalarBlocks, pulls: Floats32, hessian: Floats32) -> ScalarBlocks:
    """Fit the float16 d and dmin of super-blocks to the codes and integer scales there are.

    They change where that costs less than now.

    A value is d * rise - dmin * fall. Moving d by x and dmin by y costs, with the pulls p and moments H of
    the block, m H m^T - 2 p m^T for m = x * rise - y * fall: a least squares problem of two unknowns.

    pulls    float32 (n, elements), as in base.Refiner
    hessian  float32 (elements, elements)
    """
    rise = np.repeat(blocks.scales.astype(np.float32), layout.sub_elems, axis=1) * layout.levels[blocks.codes]
    fall = np.repeat(blocks.lows.astype(np.float32), layout.sub_elems, axis=1)
    rise_h = _product(rise, hessian)
    fall_h = _product(fall, hessian) if fall.any() else fall
    rr, rf, ff = _dot(rise_h, rise), _dot(rise_h, fall), _dot(fall_h, fall)
    rp, fp = _dot(rise, pulls), _dot(fall, pulls)
    determinant = rr * ff - rf * rf
    both = determinant > _SINGULAR * rr * ff
    divisor = np.where(both, determinant, 1)
    x = np.where(both, (ff * rp - rf * fp) / divisor, rp / np.where(rr > 0, rr, np.inf))
    y = np.where(both, (rf * rp - rr * fp) / divisor, 0)
    d, dmin = as_half(blocks.d[:, 0] + x), as_half(np.maximum(blocks.dmin[:, 0] + y, 0))
    x, y = d - blocks.d[:, 0].astype(np.float64), dmin - blocks.dmin[:, 0].astype(np.float64)
    gain = 2 * (x * rp - y * fp) - (x * x * rr - 2 * x * y * rf + y * y * ff)
    better = (gain > 0)[:, None]
    return replace(
        blocks, d=np.where(better, d[:, None], blocks.d), dmin=np.where(better, dmin[:, None], blocks.dmin)
    )


def _product(rows: Floats32, hessian: Floats32) -> Floats32:
    """Compute rows @ hessian, summed up in the same order for any number of rows."""
    n = rows.shape[1]
    product = np.zeros_like(rows)
    feed_back(as_source(-rows), n, as_source(hessian), 0, 0, n, product.reshape(-1))
    return product


def _dot(left: Floats32, right: Floats32) -> npt.NDArray[np.float64]:
    """Compute the product of each row with its partner, float64 (n,)."""
    return (left.astype(np.float64) * right).sum(axis=1)


@dataclass(frozen=True)
class ScalarRounder:
    """The rounder of a type whose weights are rounded one by one."""

    layout: ScalarLayout

    @property
    def type(self) -> GGMLType:
        return self.layout.type

    def round_block(self, rows: Floats32, panel: Panel, effort: Effort) -> tuple[Bytes, Floats32]:
        """Round some columns of each row to bytes, and decode them; see base.Rounder."""
        layout, codec = self.layout, get_format(self.type)
        n = rows.shape[1]
        start = layout.begin(layout.read(codec.encode(rows, ColumnWeights(panel.importances))))
        neighbours = layout.neighbours(start, effort.scale_window)
        lines, picks = self._lines(neighbours), _room(start)
        round_blocks(as_source(rows), as_source(panel.upper), n, layout.sub_elems, self._levels, lines, picks)
        codes, numbers = _by_row(picks, start)
        data = layout.write(chosen(neighbours, numbers, codes))
        return data, codec.decode(data, n)

    def refine_block(
        self, data: Bytes, pulls: Floats32, panel: Panel, effort: Effort
    ) -> tuple[Bytes, Floats32]:
        """Find better bytes, and how far the values move; see base.Refiner."""
        layout, decode = self.layout, get_format(self.type).decode
        n = pulls.shape[1]
        blocks, values = layout.read(data), decode(data, n)
        neighbours = layout.neighbours(blocks, 1)
        lines, picks = self._lines(neighbours), _room(blocks)
        uppers = as_source(panel.local_uppers(layout.sub_elems))
        pulls, moves = pulls.copy(), np.empty_like(pulls)
        refine_blocks(
            ScalarGround(as_source(panel.hessian), uppers, n, layout.sub_elems),
            ScalarState(as_source(values), pulls.reshape(-1), moves.reshape(-1)),
            self._levels,
            lines,
            picks,
        )
        codes, numbers = _by_row(picks, blocks)
        stays = np.repeat(numbers < 0, layout.sub_elems, axis=1)
        better = chosen(neighbours, np.maximum(numbers, 0), np.where(stays, blocks.codes, codes))
        if not layout.is_refitted:
            return layout.write(better), moves
        data = layout.write(refit(layout, better, pulls, panel.hessian))
        return data, decode(data, n) - values

    @cached_property
    def _levels(self) -> Levels:
        return Levels.of(self.layout.levels)

    def _lines(self, neighbours: ScalarBlocks) -> Lines:
        """Arrange the lines of neighbours as kernels read them, rows filled up to a multiple of LANES."""
        slopes, lows = self.layout.lines(neighbours)  # (candidates, rows, sub-blocks); lows perhaps (1, ...)
        count, n_rows, n_subs = slopes.shape
        padded = np.zeros((2, n_subs, count, _padded(n_rows)), np.float32)
        padded[0, :, :, :n_rows] = slopes.transpose(2, 0, 1)
        padded[1, :, :, :n_rows] = lows.transpose(2, 0, 1)
        return Lines(as_source(padded[0]), as_source(padded[1]), count, _padded(n_rows))


def _padded(n_rows: int) -> int:
    return -(-n_rows // LANES) * LANES


def _room(blocks: ScalarBlocks) -> Picks:
    """Make room for what kernels choose for blocks."""
    n_rows, n_subs = blocks.scales.shape
    return Picks(np.empty(blocks.codes.size, np.uint8), np.empty(n_subs * _padded(n_rows), np.int32))


def _by_row(picks: Picks, blocks: ScalarBlocks) -> tuple[Codes, Integers]:
    """Take codes and numbers apart by row: (n_rows, n), (n_rows, sub-blocks)."""
    n_rows, n_subs = blocks.scales.shape
    return picks.codes.reshape(n_rows, -1), picks.numbers.reshape(n_subs, -1).T[:n_rows]
