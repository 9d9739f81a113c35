"""Blocks of 256 rounded octet by octet, LANES rows at a time, with the scales that cost least.

For each sub-block, the integer scales around a given one are tried. The whole sub-block is rounded under
each, with feedback inside; the cheapest stays, and its errors are taken off the rest of the block.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from calibrate.rounding.grids.octets import INFINITY, OCTET, Choice, Lattice, Octet
from calibrate.rounding.grids.walks import STRIDE
from quantize.formats.base import Floats32
from quantize.simd.floats import ZERO
from quantize.simd.kernel import inlined
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
    """What all sub-blocks of a block share.

    inverses  float32 (256,), 1 / U[i, i]
    window    how many steps a scale may leave the one given
    """

    form: Form
    lattice: Lattice
    inverses: Floats32
    window: int


class Choices(NamedTuple):
    """What the kernels choose for rows, whose number is padded to a multiple of LANES: flat arrays.

    d        float32 (n_rows,), given: the scale of the scales
    scales   int32 (n_subs * n_rows,), given as those to start from, and replaced
    codes    int32 (n_groups * n_rows,), of points
    signs    int32 (32 * n_rows,), as `Choice` has them
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
    """What the search for a sub-block's scale starts from.

    at     the sub-block's first element
    d      of the block
    scale  the one around which to look
    limit  the cost below which a trial counts
    """

    at: int
    d: Floats
    scale: Ints
    limit: Floats


class Work(NamedTuple):
    """A sub-block on trial: Tiles.

    rests  what is left of its elements before any is rounded, in units of U[i, i]
    now    what it is rounded to
    best   the same of the best trial so far
    left   room for what is left of elements on the way
    units  room for the scale in these units
    """

    rests: FloatTile
    now: Choice
    best: Choice
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
    round_octet: Any, terms: Terms, at: int, attempt: int, limit: Floats, work: Work
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
        choice = Choice(codes, signs, tail(now.errors, place), tail(now.levels, place))
        octet = Octet(tail(work.left, place), tail(work.units, place), at + place)
        cost += round_octet(terms.lattice, octet, attempt, choice)
        if attempt >= form.variants and not any_lane(cost < limit):
            break
        first = at + place
        take_off(terms.lattice, now.errors, work.left, at, first, first + OCTET, at + form.sub_elems)
    return cost


@inlined
def _keep(form: Form, better: Mask, now: Choice, best: Choice) -> None:
    """Replace the best of a sub-block where the present trial is better."""
    for i in range(form.sub_elems):
        best.errors[i] = select(better, now.errors[i], best.errors[i])
        best.levels[i] = select(better, now.levels[i], best.levels[i])
    for k in range(form.sub_elems // OCTET):
        best.signs[k] = select(better, now.signs[k], best.signs[k])
    for k in range(form.codes * form.sub_elems // OCTET):
        best.codes[k] = select(better, now.codes[k], best.codes[k])


@inlined
def try_scales(round_octet: Any, terms: Terms, start: Start, work: Work) -> tuple[Floats, Ints]:
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
def round_rows(round_octet: Any, terms: Terms, source: Floats32, choices: Choices) -> None:
    """Fill `choices` for a block of each row.

    source  float32 (n * 256,), the weights with the feedback of earlier columns; where `choices` has more
            than n rows, these repeat the last one
    """
    rests, plain, left, units = float_tile(256), float_tile(256), float_tile(32), float_tile(32)
    now = Choice(int_tile(8), int_tile(4), float_tile(32), float_tile(32))
    best = Choice(int_tile(8), int_tile(4), float_tile(32), float_tile(32))
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
            work = Work(tail(rests, at), now, best, left, units)
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
