"""The kernels of blocks of 256: rounded octet by octet, LANES rows at a time, and sub-blocks chosen anew.

For each sub-block, the integer scales around a given one are tried. The whole sub-block is rounded under
each, with feedback inside; the cheapest stays, and its errors are taken off the rest of the block.

Once rows are complete, sub-blocks are chosen anew, one after the other, with all other columns as they are.
The pull of a row's errors e on its columns is p = e H. With the other columns fixed, the best values of a
sub-block would be v + p S^-1, where S are its own moments, and others cost their distance from these under S.
So those are rounded, by the walks under feedback that chose the sub-block first, with the factor of S instead
of the whole one. The choice is taken where it costs less than what stands, and the pull follows. Then d is
fitted to the block as a whole.

The kernels of each kind of octet are written out because numba finds a kernel in its cache by its name in a
module.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from quantize.formats.base import Floats32
from quantize.rounding.grids.eight_weights import (
    OCTET,
    Lattice,
    Octet,
    OctetChoice,
    round_either_shift,
    round_even_4,
    round_even_8,
    round_free_4,
    round_free_8,
    round_shifted,
)
from quantize.rounding.grids.tree_search import STRIDE
from quantize.simd.floats import INFINITY, ONE, TWO, ZERO, from_half_bits, to_half_bits
from quantize.simd.kernel import inlined, kernel
from quantize.simd.lane_memory import FloatTile, float_tile, int_tile, load, store, tail
from quantize.simd.lanes import LANES, Floats, Ints, Mask, any_lane, maximum, minimum, select, splat, to_float
from quantize.simd.tiles import load_blocks

ELEMS = 256


class Form(NamedTuple):
    """How a type scales its points: a level stands for d * (offset + slope * scale) * value.

    sub_elems  elements that share a scale, 16 or 32
    codes      points of an octet, 1 or 2
    variants   how many ways there are to round a sub-block with the same scale; the better one is taken on to
               other scales
    offset     float32
    slope      float32
    top        the largest integer scale; the smallest is 0
    """

    sub_elems: int
    codes: int
    variants: int
    offset: np.float32
    slope: np.float32
    top: int


class Terms(NamedTuple):
    """Values that all sub-blocks of a block share.

    inverses  float32 (256,), 1 / U[i, i]
    window    how many steps a scale may leave the one given
    """

    form: Form
    lattice: Lattice
    inverses: Floats32
    window: int


class RowChoices(NamedTuple):
    """RowChoices of the kernels for rows, whose number is padded to a multiple of LANES: flat arrays.

    d        float32 (n_rows,), given: the scale of the scales
    scales   int32 (n_subs * n_rows,), given as those to start from, and replaced
    codes    int32 (n_groups * n_rows,), of points
    signs    int32 (32 * n_rows,), as `OctetChoice` has them
    costs    float32 (n_rows,), the sum of the squared errors in units of U[i, i]
    factors  float32 (n_rows,), what d would be multiplied by to cost least with all else as it is; it may be
             NaN where d is 0
    """

    d: Floats32
    scales: npt.NDArray[np.int32]
    codes: npt.NDArray[np.int32]
    signs: npt.NDArray[np.int32]
    costs: Floats32
    factors: Floats32


class Start(NamedTuple):
    """Start of the search for a sub-block's scale.

    at     the sub-block's first element
    d      of the block
    scale  the one around which to look
    limit  the cost below which a trial counts
    """

    at: int
    d: Floats
    scale: Ints
    limit: Floats


class SubBlockTrial(NamedTuple):
    """A sub-block on trial: Tiles.

    rests  what is left of its elements before any is rounded, in units of U[i, i]
    now    what it is rounded to
    best   the same of the best trial so far
    left   room for what is left of elements on the way
    units  room for the scale in these units
    """

    rests: FloatTile
    now: OctetChoice
    best: OctetChoice
    left: FloatTile
    units: FloatTile


@inlined
def take_off(
    lattice: Lattice, errors: FloatTile, rests: FloatTile, at: int, first: int, last: int, stop: int
) -> None:
    """Take errors of elements first .. last - 1 off what is left of elements last .. stop - 1.

    errors, rests  Tiles of which vector 0 is that of element `at` of the block
    """
    for k in range(last, stop):
        rest = rests[k - at]
        for i in range(first, last):
            rest = rest - errors[i - at] * lattice.ratios[STRIDE * i + k]
        rests[k - at] = rest


@inlined
def _round_sub_block(
    round_octet: Any, terms: Terms, at: int, attempt: int, limit: Floats, work: SubBlockTrial
) -> Floats:
    """Round a sub-block and compute what that costs.

    It is left unfinished when no lane costs less than `limit`, but not while its variants are tried: what one
    row is rounded to later must not depend on the rows beside it.
    """
    form, now = terms.form, work.now
    cost = splat(ZERO)
    for k in range(form.sub_elems // OCTET):
        place = OCTET * k
        codes, signs = tail(now.codes, form.codes * k), tail(now.signs, k)
        choice = OctetChoice(codes, signs, tail(now.errors, place), tail(now.levels, place))
        octet = Octet(tail(work.left, place), tail(work.units, place), at + place)
        cost += round_octet(terms.lattice, octet, attempt, choice)
        if attempt >= form.variants and not any_lane(cost < limit):
            break
        first = at + place
        take_off(terms.lattice, now.errors, work.left, at, first, first + OCTET, at + form.sub_elems)
    return cost


@inlined
def _keep(form: Form, better: Mask, now: OctetChoice, best: OctetChoice) -> None:
    """Replace the best of a sub-block where the present trial is better."""
    for i in range(form.sub_elems):
        best.errors[i] = select(better, now.errors[i], best.errors[i])
        best.levels[i] = select(better, now.levels[i], best.levels[i])
    for k in range(form.sub_elems // OCTET):
        best.signs[k] = select(better, now.signs[k], best.signs[k])
    for k in range(form.codes * form.sub_elems // OCTET):
        best.codes[k] = select(better, now.codes[k], best.codes[k])


@inlined
def try_scales(round_octet: Any, terms: Terms, start: Start, work: SubBlockTrial) -> tuple[Floats, Ints]:
    """Find the scale of a sub-block that costs least; `work.best` gets what it is rounded to.

    Cost, scale and `work.best` stay those of `start` where nothing costs less than its limit.

    returns  the least cost and its scale
    """
    form, now, at = terms.form, work.now, start.at
    best_cost, best_scale = start.limit, start.scale
    last_cost = start.limit
    for attempt in range(2 * terms.window + form.variants):
        step = max(attempt - form.variants + 1, 0)
        change = (step + 1) // 2 if step % 2 else -(step // 2)
        scale = maximum(minimum(start.scale + change, form.top), 0)
        unit = start.d * (form.offset + form.slope * to_float(scale))
        for i in range(form.sub_elems):
            work.left[i] = work.rests[i]
            work.units[i] = unit * terms.inverses[at + i]
        cost = _round_sub_block(round_octet, terms, at, attempt, best_cost, work)
        if attempt == 1 and form.variants == 2:
            for k in range(form.sub_elems // OCTET):
                now.signs[k] = select(cost < last_cost, splat(-1), 0)
        last_cost = cost
        better = cost < best_cost
        best_cost = select(better, cost, best_cost)
        best_scale = select(better, scale, best_scale)
        _keep(form, better, now, work.best)
    return best_cost, best_scale


@inlined
def round_rows(round_octet: Any, terms: Terms, source: Floats32, choices: RowChoices) -> None:
    """Fill `choices` for a block of each row.

    source  float32 (n * 256,), the weights with the feedback of earlier columns; where `choices` has more
            than n rows, these repeat the last one
    """
    rests, plain, left, units = float_tile(256), float_tile(256), float_tile(32), float_tile(32)
    now = OctetChoice(int_tile(8), int_tile(4), float_tile(32), float_tile(32))
    best = OctetChoice(int_tile(8), int_tile(4), float_tile(32), float_tile(32))
    form, lattice = terms.form, terms.lattice
    n_rows, size = choices.d.size, form.sub_elems
    for first in range(0, n_rows, LANES):
        load_blocks(source, first, ELEMS, rests)
        for i in range(ELEMS):
            rests[i] = rests[i] * terms.inverses[i]
            plain[i] = rests[i]
        d = load(choices.d, first)
        total = splat(ZERO)
        along, across = splat(ZERO), splat(ZERO)
        for j in range(ELEMS // size):
            at = size * j
            start = Start(at, d, load(choices.scales, j * n_rows + first), splat(INFINITY))
            work = SubBlockTrial(tail(rests, at), now, best, left, units)
            cost, scale = try_scales(round_octet, terms, start, work)
            total += cost
            store(choices.scales, j * n_rows + first, scale)
            for k in range(size // OCTET):
                store(choices.signs, (at // OCTET + k) * n_rows + first, best.signs[k])
            for k in range(form.codes * size // OCTET):
                store(choices.codes, (at // OCTET * form.codes + k) * n_rows + first, best.codes[k])
            take_off(lattice, best.errors, tail(rests, at), at, at, at + size, ELEMS)
            for i in range(size):
                # had nothing been rounded, the error of an element would be all that is left of it
                whole = plain[at + i]
                for k in range(i + 1, size):
                    plain[at + k] = plain[at + k] - whole * lattice.ratios[STRIDE * (at + i) + at + k]
                rounded = whole - best.errors[i]
                along += rounded * whole
                across += rounded * rounded
            take_off(lattice, tail(plain, at), tail(plain, at), at, at, at + size, ELEMS)
        store(choices.costs, first, total)
        store(choices.factors, first, along / across)


_ENOUGH = np.float32(1 - 1e-5)
"""The share of its cost below which a choice counts as better, so that rounding alone changes nothing."""

_LEAST_GAIN = np.float32(1e-6)
"""The share of what a block's values cost by themselves that another d has to gain."""


class GridGround(NamedTuple):
    """Costs of the columns of a block: flat arrays.

    It goes with Terms of the factors of the sub-blocks by themselves, whose ratios are 1 on the diagonal.

    hessian   float32 (256 * 256,), their moments
    diagonal  float32 (256,), U[i, i] of these factors
    """

    hessian: Floats32
    diagonal: Floats32


class GridState(NamedTuple):
    """State of a block of each row: flat arrays. All but the first two are replaced.

    pulls   float32 (n * 256,), the pulls on the columns of the block
    values  float32 (n * 256,), what the block stands for
    d       float32 (n_rows,), n_rows a multiple of LANES; where it is more than n, these repeat the last row
    scales  int32 (n_subs * n_rows,)
    codes   int32 (n_groups * n_rows,), of points
    signs   int32 (32 * n_rows,), as `OctetChoice` has them
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
    terms: Terms, ground: GridGround, at: int, values: FloatTile, pulls: FloatTile, rests: FloatTile
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
def _fit_d(ground: GridGround, d: Floats, values: FloatTile, pulls: FloatTile) -> Floats:
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
    gain = change * (TWO * along - change * across)
    better = (fitted > ZERO) & (fitted < INFINITY) & (gain > _LEAST_GAIN * across)
    return select(better, fitted, d)


@inlined
def refine_rows(round_octet: Any, terms: Terms, ground: GridGround, state: GridState) -> None:
    """Change a block of each row for the better."""
    pulls, values, moves = float_tile(256), float_tile(256), float_tile(32)
    now = OctetChoice(int_tile(8), int_tile(4), float_tile(32), float_tile(32))
    best = OctetChoice(int_tile(8), int_tile(4), float_tile(32), float_tile(32))
    work = SubBlockTrial(float_tile(32), now, best, float_tile(32), float_tile(32))
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


class Kernels(NamedTuple):
    """The kernels of a kind of octet."""

    round: Callable[[Terms, Floats32, RowChoices], None]
    refine: Callable[[Terms, GridGround, GridState], None]


@kernel
def _round_eights(terms: Terms, source: Floats32, choices: RowChoices) -> None:
    round_rows(round_free_8, terms, source, choices)


@kernel
def _refine_eights(terms: Terms, ground: GridGround, state: GridState) -> None:
    refine_rows(round_free_8, terms, ground, state)


@kernel
def _round_even_eights(terms: Terms, source: Floats32, choices: RowChoices) -> None:
    round_rows(round_even_8, terms, source, choices)


@kernel
def _refine_even_eights(terms: Terms, ground: GridGround, state: GridState) -> None:
    refine_rows(round_even_8, terms, ground, state)


@kernel
def _round_fours(terms: Terms, source: Floats32, choices: RowChoices) -> None:
    round_rows(round_free_4, terms, source, choices)


@kernel
def _refine_fours(terms: Terms, ground: GridGround, state: GridState) -> None:
    refine_rows(round_free_4, terms, ground, state)


@kernel
def _round_even_fours(terms: Terms, source: Floats32, choices: RowChoices) -> None:
    round_rows(round_even_4, terms, source, choices)


@kernel
def _refine_even_fours(terms: Terms, ground: GridGround, state: GridState) -> None:
    refine_rows(round_even_4, terms, ground, state)


@kernel
def _round_shifted_eights(terms: Terms, source: Floats32, choices: RowChoices) -> None:
    round_rows(round_shifted, terms, source, choices)


@kernel
def _refine_shifted_eights(terms: Terms, ground: GridGround, state: GridState) -> None:
    refine_rows(round_shifted, terms, ground, state)


@kernel
def _round_eights_by_shift(terms: Terms, source: Floats32, choices: RowChoices) -> None:
    round_rows(round_either_shift, terms, source, choices)


@kernel
def _refine_eights_by_shift(terms: Terms, ground: GridGround, state: GridState) -> None:
    refine_rows(round_either_shift, terms, ground, state)


EIGHTS = Kernels(_round_eights, _refine_eights)
"""Of IQ2_S."""
EVEN_EIGHTS = Kernels(_round_even_eights, _refine_even_eights)
"""Of IQ2_XXS and IQ2_XS."""
FOURS = Kernels(_round_fours, _refine_fours)
"""Of IQ3_S."""
EVEN_FOURS = Kernels(_round_even_fours, _refine_even_fours)
"""Of IQ3_XXS."""
SHIFTED_EIGHTS = Kernels(_round_shifted_eights, _refine_shifted_eights)
"""Of IQ1_S, whose two variants are shifts."""
EIGHTS_BY_SHIFT = Kernels(_round_eights_by_shift, _refine_eights_by_shift)
"""Of IQ1_M."""
