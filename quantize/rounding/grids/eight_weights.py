"""Eight weights rounded under feedback: the best points of the grid with their signs, LANES rows at a time.

An octet is a group of 8 or two groups of 4. Where a block stores seven signs of eight, the count of minus
signs is even. Two groups of 4 share it: the first one is searched for its best point with either count, and
the second goes on from both.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from quantize.rounding.grids.tree_search import (
    LEVELS,
    STRIDE,
    Best,
    RoundedGroup,
    Tree,
    Way,
    even_walk_of_4,
    even_walk_of_8,
    free_walk_of_4,
    free_walk_of_8,
    go,
    plain_walk_of_8,
    with_sign_of,
)
from quantize.simd.floats import INFINITY, ZERO
from quantize.simd.kernel import inlined
from quantize.simd.lane_items import look_up
from quantize.simd.lane_memory import FloatTile, IntTile, float_tile, int_tile, load, tail
from quantize.simd.lanes import Floats, Ints, bits, from_bits, select, splat

OCTET = 8

SHIFT = np.float32(0.125)
"""The shift of IQ1's levels, up or down."""


class Lattice(NamedTuple):
    """Values that all octets of a block share.

    tree    the grid
    values  float32 (16,): what each level decodes to, before the scale
    ratios  float32, flat: ratios[STRIDE * i + j] = U[i, j] / U[j, j]
    """

    tree: Tree
    values: npt.NDArray[np.float32]
    ratios: npt.NDArray[np.float32]


class Octet(NamedTuple):
    """The elements to round: Tiles, but for the number of the first one in its block.

    rests  what is left of each, in units of U[i, i]; rounding takes the errors of earlier ones off
    units  the scale in these units: scale / U[i, i]
    first  a multiple of 8
    """

    rests: FloatTile
    units: FloatTile
    first: int


class OctetChoice(NamedTuple):
    """Points that an octet is rounded to, and the errors: Tiles.

    codes   of the points: one vector, or two for groups of 4
    signs   one vector: bit i is set where element i is negative; of IQ1, all are where the shift is -1/8
    errors  of the 8 elements, in units of U[i, i]
    levels  what the 8 elements are rounded to, in the same units
    """

    codes: IntTile
    signs: IntTile
    errors: FloatTile
    levels: FloatTile


@inlined
def _fill_steps(
    lattice: Lattice, octet: Octet, start: int, size: int, levels: int, shift: Any, steps: FloatTile
) -> None:
    """Fill the steps of the group that begins at element `start`; shift is a float32 or Floats."""
    for i in range(size):
        for k in range(levels):
            steps[LEVELS * i + k] = (lattice.values[k] + shift) * octet.units[start + i]


@inlined
def _group(lattice: Lattice, octet: Octet, start: int, steps: FloatTile) -> RoundedGroup:
    return RoundedGroup(lattice.tree, steps, lattice.ratios, (STRIDE + 1) * (octet.first + start))


@inlined
def _level(lattice: Lattice, octet: Octet, i: int, code: Ints) -> Floats:
    """Look up the magnitude that the lowest level of a code gives element i, in units of U[i, i]."""
    return look_up(load(lattice.values, 0), code) * octet.units[i]


@inlined
def _settle(lattice: Lattice, octet: Octet, i: int, level: Floats, choice: OctetChoice) -> Floats:
    """Compute what element i costs at a level; note its error, and take it off what is left of the others."""
    error = octet.rests[i] - level
    choice.errors[i], choice.levels[i] = error, level
    for k in range(i + 1, OCTET):
        ratio = lattice.ratios[STRIDE * (octet.first + i) + octet.first + k]
        octet.rests[k] = octet.rests[k] - error * ratio
    return error * error


@inlined
def _start(rests: FloatTile, size: int, cost: np.float32, way: Way) -> None:
    for i in range(size):
        way.rests[i] = rests[i]
    way.costs[0] = splat(cost)


@inlined
def _reset(best: Best) -> None:
    best.costs[0] = splat(INFINITY)
    best.codes[0] = splat(0)


@inlined
def _search_8(walk: Any, lattice: Lattice, octet: Octet, shift: Any, best: Best) -> None:
    """Find the best point of a group of 8 by one of the walks that go one way."""
    steps, way = float_tile(64), Way(float_tile(64), float_tile(8))
    _fill_steps(lattice, octet, 0, 8, 3, shift, steps)
    _reset(best)
    _start(octet.rests, 8, ZERO, way)
    walk(_group(lattice, octet, 0, steps), way, best, 0)


# ---- any signs


@inlined
def _settle_free(
    lattice: Lattice, octet: Octet, start: int, size: int, code_bits: int, code: Ints, choice: OctetChoice
) -> Floats:
    """Compute what a group costs at a point, and settle its elements."""
    cost = splat(ZERO)
    for i in range(start, start + size):
        level = with_sign_of(octet.rests[i], _level(lattice, octet, i, code >> code_bits * (i - start)))
        choice.signs[0] = choice.signs[0] | select(bits(level) < 0, splat(1 << i), 0)
        cost += _settle(lattice, octet, i, level, choice)
    return cost


@inlined
def round_free_8(lattice: Lattice, octet: Octet, attempt: int, choice: OctetChoice) -> Floats:
    """Compute what the best group of 8 costs; fill the choice."""
    best = Best(float_tile(1), int_tile(1))
    _search_8(free_walk_of_8, lattice, octet, ZERO, best)
    choice.codes[0], choice.signs[0] = best.codes[0], splat(0)
    return _settle_free(lattice, octet, 0, 8, 2, best.codes[0], choice)


@inlined
def round_free_4(lattice: Lattice, octet: Octet, attempt: int, choice: OctetChoice) -> Floats:
    """Compute what the best group of 4, and then the best second one, cost; fill the choice."""
    steps, way, best = float_tile(32), Way(float_tile(32), float_tile(4)), Best(float_tile(1), int_tile(1))
    choice.signs[0] = splat(0)
    cost = splat(ZERO)
    for k in range(2):
        _fill_steps(lattice, octet, 4 * k, 4, 8, ZERO, steps)
        _reset(best)
        _start(tail(octet.rests, 4 * k), 4, ZERO, way)
        free_walk_of_4(_group(lattice, octet, 4 * k, steps), way, best, 0)
        choice.codes[k] = best.codes[0]
        cost += _settle_free(lattice, octet, 4 * k, 4, 3, best.codes[0], choice)
    return cost


# ---- an even count of minus signs


class Signed(NamedTuple):
    """A way through a whole octet, and what it has chosen: Tiles of one vector, but for `way`.

    way    with what is left of all 8 elements
    signs  bit i: whether element i is negative
    codes  of the first group of 4
    """

    way: Way
    signs: IntTile
    codes: IntTile


@inlined
def _go_both(
    lattice: Lattice, octet: Octet, group: RoundedGroup, i: int, level: Floats, even: Signed, odd: Signed
) -> None:
    """Go on from element i, at a level, to the cheaper way with either count of minus signs."""
    to_even = go(group, i, OCTET, level, even.way, odd.way, even.way)
    to_odd = go(group, i, OCTET, level, odd.way, even.way, odd.way)
    minus = 1 << i
    signs = select(to_even, even.signs[0], odd.signs[0] | minus)
    odd.signs[0] = select(to_odd, odd.signs[0], even.signs[0] | minus)
    even.signs[0] = signs
    codes = select(to_even, even.codes[0], odd.codes[0])
    odd.codes[0] = select(to_odd, odd.codes[0], even.codes[0])
    even.codes[0] = codes


@inlined
def _settle_signed(
    lattice: Lattice, octet: Octet, start: int, size: int, code_bits: int, code: Ints, choice: OctetChoice
) -> Floats:
    """Compute what a group costs at a point with the signs of the choice, and settle its elements."""
    cost = splat(ZERO)
    for i in range(start, start + size):
        level = _level(lattice, octet, i, code >> code_bits * (i - start))
        level = from_bits(bits(level) ^ (choice.signs[0] >> i & 1) << 31)
        cost += _settle(lattice, octet, i, level, choice)
    return cost


@inlined
def round_even_8(lattice: Lattice, octet: Octet, attempt: int, choice: OctetChoice) -> Floats:
    """Compute what the best group of 8 costs; fill the choice."""
    steps, best = float_tile(64), Best(float_tile(1), int_tile(1))
    even = Signed(Way(float_tile(72), float_tile(9)), int_tile(1), int_tile(1))
    odd = Signed(Way(float_tile(72), float_tile(9)), int_tile(1), int_tile(1))
    _fill_steps(lattice, octet, 0, 8, 3, ZERO, steps)
    group = _group(lattice, octet, 0, steps)
    _reset(best)
    _start(octet.rests, 8, ZERO, even.way)
    _start(octet.rests, 8, INFINITY, odd.way)
    even_walk_of_8(group, even.way, odd.way, best, 0)
    even.signs[0] = odd.signs[0] = even.codes[0] = odd.codes[0] = splat(0)
    for i in range(8):
        _go_both(lattice, octet, group, i, _level(lattice, octet, i, best.codes[0] >> 2 * i), even, odd)
    choice.codes[0], choice.signs[0] = best.codes[0], even.signs[0]
    return _settle_signed(lattice, octet, 0, 8, 2, best.codes[0], choice)


@inlined
def _begin(
    lattice: Lattice,
    octet: Octet,
    group: RoundedGroup,
    wanted: Way,
    other: Way,
    best: Best,
    even: Signed,
    odd: Signed,
) -> None:
    """Go through the first group of 4 to its best point that ends in the way that is `wanted`."""
    _start(octet.rests, 8, ZERO, even.way)
    _start(octet.rests, 8, INFINITY, odd.way)
    _reset(best)
    even_walk_of_4(group, wanted, other, best, 0)
    code = best.codes[0]
    _start(octet.rests, 8, ZERO, even.way)
    _start(octet.rests, 8, INFINITY, odd.way)
    even.signs[0] = odd.signs[0] = splat(0)
    even.codes[0] = odd.codes[0] = code
    for i in range(4):
        _go_both(lattice, octet, group, i, _level(lattice, octet, i, code >> 3 * i), even, odd)


@inlined
def round_even_4(lattice: Lattice, octet: Octet, attempt: int, choice: OctetChoice) -> Floats:
    """Compute what the best two groups of 4 cost; fill the choice."""
    steps, best = float_tile(64), Best(float_tile(1), int_tile(1))
    even = Signed(Way(float_tile(72), float_tile(9)), int_tile(1), int_tile(1))
    odd = Signed(Way(float_tile(72), float_tile(9)), int_tile(1), int_tile(1))
    kept = Signed(Way(float_tile(72), float_tile(9)), int_tile(1), int_tile(1))
    _fill_steps(lattice, octet, 0, 8, 8, ZERO, steps)
    group = _group(lattice, octet, 0, steps)
    _begin(lattice, octet, group, odd.way, even.way, best, even, odd)
    kept.signs[0], kept.codes[0] = odd.signs[0], odd.codes[0]
    kept.way.costs[4] = odd.way.costs[4]
    for i in range(4, 8):
        kept.way.rests[32 + i] = odd.way.rests[32 + i]
    _begin(lattice, octet, group, even.way, odd.way, best, even, odd)
    second = RoundedGroup(lattice.tree, tail(steps, 4 * LEVELS), lattice.ratios, group.at + 4 * (STRIDE + 1))
    # the walk of 4 sees the second half of the ways as ways of its own
    to_even, to_odd = Way(float_tile(40), float_tile(5)), Way(float_tile(40), float_tile(5))
    for i in range(4):
        to_even.rests[i], to_odd.rests[i] = even.way.rests[36 + i], kept.way.rests[36 + i]
    to_even.costs[0], to_odd.costs[0] = even.way.costs[4], kept.way.costs[4]
    _reset(best)
    even_walk_of_4(second, to_even, to_odd, best, 0)
    for i in range(4, 8):
        _go_both(
            lattice, octet, group, i, _level(lattice, octet, i, best.codes[0] >> 3 * (i - 4)), even, kept
        )
    choice.codes[0], choice.codes[1], choice.signs[0] = even.codes[0], best.codes[0], even.signs[0]
    cost = _settle_signed(lattice, octet, 0, 4, 3, choice.codes[0], choice)
    return cost + _settle_signed(lattice, octet, 4, 4, 3, choice.codes[1], choice)


# ---- IQ1


@inlined
def _round_shifted(lattice: Lattice, octet: Octet, shift: Floats, choice: OctetChoice) -> Floats:
    """Compute what the best group of 8 of the grid IQ1 costs with levels shifted; fill codes and errors."""
    best = Best(float_tile(1), int_tile(1))
    _search_8(plain_walk_of_8, lattice, octet, shift, best)
    choice.codes[0] = best.codes[0]
    cost = splat(ZERO)
    values = load(lattice.values, 0)
    for i in range(8):
        level = (look_up(values, best.codes[0] >> 2 * i) + shift) * octet.units[i]
        cost += _settle(lattice, octet, i, level, choice)
    return cost


@inlined
def _shift(choice: OctetChoice) -> Floats:
    return select(choice.signs[0] != 0, splat(-SHIFT), SHIFT)


@inlined
def round_shifted(lattice: Lattice, octet: Octet, attempt: int, choice: OctetChoice) -> Floats:
    """Compute what the best group costs, with the shift 1/8 (attempt 0), -1/8 (1) or that of the choice."""
    if attempt < 2:
        choice.signs[0] = splat(-attempt)
    return _round_shifted(lattice, octet, _shift(choice), choice)


@inlined
def round_either_shift(lattice: Lattice, octet: Octet, attempt: int, choice: OctetChoice) -> Floats:
    """Compute what the best group costs, with either shift (attempt 0) or that of the choice; fill it."""
    rests = float_tile(8)
    other = OctetChoice(int_tile(1), int_tile(1), float_tile(8), float_tile(8))
    other_cost = splat(INFINITY)
    if attempt == 0:
        for i in range(8):
            rests[i] = octet.rests[i]
        other_octet = Octet(rests, octet.units, octet.first)
        other_cost = _round_shifted(lattice, other_octet, splat(-SHIFT), other)
        choice.signs[0] = splat(0)
    cost = _round_shifted(lattice, octet, _shift(choice), choice)
    if attempt == 0:
        minus = other_cost < cost
        cost = select(minus, other_cost, cost)
        choice.codes[0] = select(minus, other.codes[0], choice.codes[0])
        choice.signs[0] = select(minus, splat(-1), 0)
        for i in range(8):
            choice.errors[i] = select(minus, other.errors[i], choice.errors[i])
            choice.levels[i] = select(minus, other.levels[i], choice.levels[i])
    return cost
