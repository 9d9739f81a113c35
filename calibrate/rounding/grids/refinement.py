"""Sub-blocks chosen anew, one after the other, with all other columns as they are.

The pull of a row's errors e on its columns is p = e H. With the other columns fixed, the best values of a
sub-block would be v + p S^-1, where S are its own moments, and others cost their distance from these under S.
So those are rounded, by the walks under feedback that chose the sub-block first, with the factor of S instead
of the whole one. The choice is taken where it costs less than what stands, and the pull follows. Then d is
fitted to the block as a whole.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from calibrate.rounding.grids.blocks import ELEMS, Start, Terms, Work, try_scales
from calibrate.rounding.grids.octets import INFINITY, OCTET, Choice
from calibrate.rounding.grids.walks import STRIDE
from quantize.formats.base import Floats32
from quantize.simd.floats import ONE, ZERO, from_half_bits, to_half_bits
from quantize.simd.kernel import inlined
from quantize.simd.lane_memory import FloatTile, float_tile, int_tile, load, store
from quantize.simd.lanes import LANES, Floats, any_lane, select, splat
from quantize.simd.tiles import load_blocks

_TWO = np.float32(2)

_ENOUGH = np.float32(1 - 1e-5)
"""The share of its cost below which a choice counts as better, so that rounding alone changes nothing."""

_LEAST_GAIN = np.float32(1e-6)
"""The share of what a block's values cost by themselves that another d has to gain."""


class Ground(NamedTuple):
    """What the columns of a block cost: flat arrays.

    It goes with Terms of the factors of the sub-blocks by themselves, whose ratios are 1 on the diagonal.

    hessian   float32 (256 * 256,), their moments
    diagonal  float32 (256,), U[i, i] of these factors
    """

    hessian: Floats32
    diagonal: Floats32


class State(NamedTuple):
    """What a block of each row is: flat arrays. All but the first two are replaced.

    pulls   float32 (n * 256,), the pulls on the columns of the block
    values  float32 (n * 256,), what the block stands for
    d       float32 (n_rows,), n_rows a multiple of LANES; where it is more than n, these repeat the last row
    scales  int32 (n_subs * n_rows,)
    codes   int32 (n_groups * n_rows,), of points
    signs   int32 (32 * n_rows,), as `Choice` has them
    """

    pulls: Floats32
    values: Floats32
    d: Floats32
    scales: npt.NDArray[np.int32]
    codes: npt.NDArray[np.int32]
    signs: npt.NDArray[np.int32]


@inlined
def _follow(hessian: Floats32, count: int, moves: FloatTile, pulls: FloatTile) -> None:
    """Change the pulls of a block as `count` of its values move.

    hessian  (count * 256,), the rows of these values: an index from 0 on takes LLVM no check of its sign
    """
    for k in range(ELEMS):
        pull = pulls[k]
        for i in range(count):
            pull = pull - moves[i] * hessian[ELEMS * i + k]
        pulls[k] = pull


@inlined
def _aim(
    terms: Terms, ground: Ground, at: int, values: FloatTile, pulls: FloatTile, rests: FloatTile
) -> Floats:
    """Compute what a sub-block costs as it is; fill `rests` with its best values, in units of U[i, i]."""
    ratios, size = terms.lattice.ratios, terms.form.sub_elems
    cost = splat(ZERO)
    for i in range(size):
        rests[i] = values[at + i] * terms.inverses[at + i]
    for i in range(size):
        error = splat(ZERO)
        for k in range(i, size):
            error += pulls[at + k] * ground.diagonal[at + k] * ratios[STRIDE * (at + i) + at + k]
        cost += error * error
        for k in range(i, size):
            rests[k] = rests[k] + error * ratios[STRIDE * (at + i) + at + k]
    return cost


@inlined
def _fit_d(ground: Ground, d: Floats, values: FloatTile, pulls: FloatTile) -> Floats:
    """Find the d that fits a block best with all else as it is."""
    along, across = splat(ZERO), splat(ZERO)
    for i in range(ELEMS):
        along += values[i] * pulls[i]
        moved = splat(ZERO)
        for k in range(ELEMS):
            moved += values[k] * ground.hessian[ELEMS * i + k]
        across += values[i] * moved
    fitted = from_half_bits(to_half_bits(d + d * (along / across)))
    change = fitted / d - ONE
    gain = change * (_TWO * along - change * across)
    better = (fitted > ZERO) & (fitted < INFINITY) & (gain > _LEAST_GAIN * across)
    return select(better, fitted, d)


@inlined
def refine_rows(round_octet: Any, terms: Terms, ground: Ground, state: State) -> None:
    """Change a block of each row for the better."""
    pulls, values, moves = float_tile(256), float_tile(256), float_tile(32)
    now = Choice(int_tile(8), int_tile(4), float_tile(32), float_tile(32))
    best = Choice(int_tile(8), int_tile(4), float_tile(32), float_tile(32))
    work = Work(float_tile(32), now, best, float_tile(32), float_tile(32))
    form = terms.form
    n_rows, size = state.d.size, form.sub_elems
    for first in range(0, n_rows, LANES):
        load_blocks(state.pulls, first, ELEMS, pulls)
        load_blocks(state.values, first, ELEMS, values)
        d = load(state.d, first)
        for j in range(ELEMS // size):
            at = size * j
            place = j * n_rows + first
            limit = _aim(terms, ground, at, values, pulls, work.rests) * _ENOUGH
            start = Start(at, d, load(state.scales, place), limit)
            cost, scale = try_scales(round_octet, terms, start, work)
            better = cost < limit
            if not any_lane(better):
                continue
            store(state.scales, place, scale)
            for k in range(size // OCTET):
                place = (at // OCTET + k) * n_rows + first
                store(state.signs, place, select(better, best.signs[k], load(state.signs, place)))
            for k in range(form.codes * size // OCTET):
                place = (at // OCTET * form.codes + k) * n_rows + first
                store(state.codes, place, select(better, best.codes[k], load(state.codes, place)))
            for i in range(size):
                value = select(better, best.levels[i] * ground.diagonal[at + i], values[at + i])
                moves[i] = value - values[at + i]
                values[at + i] = value
            _follow(ground.hessian[ELEMS * at : ELEMS * (at + size)], size, moves, pulls)
        store(state.d, first, _fit_d(ground, d, values, pulls))
