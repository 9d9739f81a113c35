"""Sub-blocks chosen anew, one after the other, with all other columns as they are; then scales of scales.

The pull of a row's errors e on its columns is p = e H. With the other columns fixed, the best values of a
sub-block would be v + p H_jj^-1, H_jj its own moments, and what other values cost is measured from there. So
choosing them is rounding with feedback once more, by the factor of H_jj. The choice is taken where it costs
less than v does, and the pull follows.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from calibrate.rounding.base import PANEL
from calibrate.rounding.products import feed_back
from calibrate.rounding.scalar.blocks import Blocks, Layout, as_half
from calibrate.rounding.scalar.rounding import (
    ONE,
    WORDS,
    ZERO,
    Columns,
    Levels,
    Lines,
    Picks,
    Rounded,
    choose,
    code_of,
)
from quantize.formats.base import Floats32, as_source
from quantize.simd.kernel import inlined, kernel
from quantize.simd.lane_memory import FloatTile, float_tile, int_tile, store, tail
from quantize.simd.lanes import LANES, Floats, select, splat
from quantize.simd.packing import pack
from quantize.simd.tiles import load_blocks, store_blocks, store_columns

_LEAST_GAIN = np.float32(1 - 1e-5)
"""The share of its cost below which a choice counts as better, so that rounding alone changes nothing."""

_SINGULAR = 1e-6
"""The share of the product of both variances below which scale and minimum can't be told apart."""


class Ground(NamedTuple):
    """What the columns of a block cost: flat arrays.

    hessian  (n * n,), their moments, n <= PANEL a multiple of LANES
    uppers   (n * size,), the factor of each sub-block's own moments
    n        columns of the block
    size     columns of a sub-block
    """

    hessian: Floats32
    uppers: Floats32
    n: int
    size: int


class State(NamedTuple):
    """What a block of each row is: (n_rows * n,) each.

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
def refine_blocks(ground: Ground, state: State, levels: Levels, lines: Lines, picks: Picks) -> None:
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


def refit(layout: Layout, blocks: Blocks, pulls: Floats32, hessian: Floats32) -> Blocks:
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
