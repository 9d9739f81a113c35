"""Parts that IQ3_XXS and IQ3_S share: signs apart, levels from a grid, and the search for a scale.

A super-block is 256 weights in sub-blocks of 32, a sub-block is groups of 4. A weight is about +-scale times
an odd number from 1 to 15, 2 * level + 1, and the levels of a group are a point of the format's grid. Signs
are taken off first (grid_blocks.load_sub_block).

The search tries inverse scales around the one that gives the largest magnitude the value 15. Each candidate
rounds every element to a level, moves groups off the grid to a neighbour, and gets a weighted least squares
fit; the fit's error decides. Afterwards groups that had to be moved (IQ3_XXS), or all groups of a sub-block
in which one had to be (IQ3_S), are coded again with the winning scale.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from quantize.formats.iq.grid_blocks import ELEMS, SubBlock
from quantize.formats.iq.grids import NOWHERE, Grid, GridTables
from quantize.formats.iq.grids.cached_search_4 import Answers, answer, prepare, prepare_once
from quantize.simd.floats import ONE, ZERO
from quantize.simd.kernel import inlinable
from quantize.simd.lane_memory import FloatTile, IntTile, gather, tail
from quantize.simd.lanes import Floats, Ints, Mask, bits, from_bits, maximum, minimum, select, splat, to_float

SUB_BLOCK = 32
GROUP = 4
GROUPS = SUB_BLOCK // GROUP
CODE_BITS = 3

_TOP = np.float32(15)
_STEP = np.float32(0.2)
_MAGIC = np.float32(1.5 * 2**24)  # float32 has steps of two there
_FRACTION = 0x007FFFFF
_LEVEL_ZERO = 0x00400000
_NUMBER = (1 << CODE_BITS * GROUP) - 1


class IQ3Search(NamedTuple):
    """A sub-block and what its search keeps: Tiles."""

    sub: SubBlock
    answers: Answers
    codes: IntTile  # Ints, one vector per group: codes of the best candidate
    moved: IntTile  # Ints: 1 where the group's point was off the grid, else 0


@inlinable
def weigh_by_square(x: FloatTile, weights: FloatTile) -> None:
    """Fill `weights` with x**2, where there are no importances."""
    for i in range(ELEMS):
        weights[i] = x[i] * x[i]


@inlinable
def largest_value(x: FloatTile) -> Floats:
    """Return the largest of the 32 values of a sub-block, whose signs are off: at times one is negative."""
    largest = x[0]
    for i in range(1, SUB_BLOCK):
        largest = maximum(largest, x[i])
    return largest


@inlinable
def _number(x: FloatTile, inverse: Floats) -> Ints:
    """Return the lattice number of the levels nearest to a group: (x * inverse - 1) / 2, in 0 .. 7.

    nearest_int of half of a value has the fraction bits that twice the magic number gives to the value.
    """
    number = splat(0)
    for step in range(GROUP):
        i = GROUP - 1 - step
        level = bits(inverse * x[i] - ONE + _MAGIC) & _FRACTION
        number = number << CODE_BITS | maximum(minimum(level, _LEVEL_ZERO + 7), _LEVEL_ZERO)
    return number & _NUMBER


@inlinable
def _add_to_fit(sub: SubBlock, k: int, code: Ints, sum_qx: Floats, sum_q2: Floats) -> tuple[Floats, Floats]:
    """Return the weighted sums of value * x and of value**2 with those of group k added."""
    twice = code << 1
    for i in range(GROUP):
        value = to_float(twice >> CODE_BITS * i & 14 | 1)
        sum_qx += sub.weighted[GROUP * k + i] * value
        sum_q2 += sub.weights[GROUP * k + i] * value * value
    return sum_qx, sum_q2


@inlinable
def search_candidates(
    tables: GridTables, search: IQ3Search, reach: int, top: Floats, active: Mask
) -> tuple[Floats, Mask]:
    """Return the best scale and where the search failed; fill `codes` and `moved`.

    The inverse scales are (15 + step / 5) / top, step = -reach .. reach. Without a candidate better than
    nothing the scale is top / 15, all codes are 0, and `moved` stays as it comes.

    top     the magnitude that is to get the value 15
    active  where there is something to search
    """
    sub, answers = search.sub, search.answers
    spread = np.float32(reach) * _STEP
    prepare(sub.x, sub.roots, top / (_TOP + spread), top / (_TOP - spread), GROUPS, answers)
    scale = top / _TOP
    best = splat(ZERO)
    failed = ~(active | ~active)
    for k in range(GROUPS):
        search.codes[k] = splat(0)
        answers.wanted[k] = select(active, splat(1), 0)
    for step in range(-reach, reach + 1):
        inverse = (_TOP + np.float32(step) * _STEP) / top
        sum_qx = splat(ZERO)
        sum_q2 = splat(ZERO)
        for k in range(GROUPS):
            answers.numbers[k] = _number(tail(sub.x, GROUP * k), inverse)
        answer(tables, sub.x, sub.roots, ONE / inverse, inverse, GROUPS, answers)
        for k in range(GROUPS):
            failed |= active & (answers.codes[k] == NOWHERE)
            sum_qx, sum_q2 = _add_to_fit(sub, k, answers.codes[k], sum_qx, sum_q2)
        better = active & (sum_q2 > ZERO) & (sum_qx * sum_qx > best * sum_q2)
        scale = select(better, sum_qx / sum_q2, scale)
        best = select(better, scale * sum_qx, best)
        for k in range(GROUPS):
            off_grid = select(answers.codes[k] != answers.numbers[k], splat(1), 0)
            search.moved[k] = select(better, off_grid, search.moved[k])
            search.codes[k] = select(better, answers.codes[k], search.codes[k])
    return scale, failed


@inlinable
def search_again(tables: GridTables, search: IQ3Search, scale: Floats) -> tuple[Floats, Mask]:
    """Return a scale fitted again and where the search failed, after new codes for this scale.

    Groups get a new code where `moved` is 1 and the scale is positive.
    """
    sub, answers = search.sub, search.answers
    inverse = ONE / scale
    prepare_once(GROUPS, answers)
    any_moved = search.moved[0]
    for k in range(1, GROUPS):
        any_moved |= search.moved[k]
    changed = (any_moved != 0) & (scale > ZERO)
    failed = ~(changed | ~changed)
    sum_qx = splat(ZERO)
    sum_q2 = splat(ZERO)
    for k in range(GROUPS):
        answers.numbers[k] = _number(tail(sub.x, GROUP * k), inverse)
        answers.wanted[k] = select(changed, search.moved[k], 0)
    answer(tables, sub.x, sub.roots, scale, inverse, GROUPS, answers)
    for k in range(GROUPS):
        code = select(answers.wanted[k] != 0, answers.codes[k], search.codes[k])
        failed |= code == NOWHERE
        search.codes[k] = code
        sum_qx, sum_q2 = _add_to_fit(sub, k, code, sum_qx, sum_q2)
    return select(changed & (sum_q2 > ZERO), sum_qx / sum_q2, scale), failed


@inlinable
def finish(
    tables: GridTables,
    search: IQ3Search,
    scale: Floats,
    active: Mask,
    failed: Mask,
    all_signs: int,
    signs: IntTile,
    indices: IntTile,
) -> tuple[Floats, Mask]:
    """Return the scale as a positive number and where the sub-block failed; fill `indices` from the codes.

    A scale below 0, as wrong signs may give, turns all signs instead. An inactive sub-block is all zero.

    all_signs  the bits of signs that are stored
    """
    for k in range(SUB_BLOCK // 8):
        turned = select(scale < ZERO, signs[k] ^ all_signs, signs[k])
        signs[k] = select(active, turned & all_signs, 0)
    for k in range(GROUPS):
        indices[k] = select(active, gather(tables.indices, search.codes[k] & _NUMBER), 0)
    scale = select(scale < ZERO, -scale, scale)
    return select(active, scale, ZERO), active & (failed | ~(scale >= ZERO))


def point_values(grid: Grid) -> npt.NDArray[np.float32]:
    """Return the values of a grid's points, element by element, without scale: float32 (n_points * 4,)."""
    return grid.points.astype(np.float32).reshape(-1)


@inlinable
def decode_eight(
    values: npt.NDArray[np.float32],
    first: int,
    second: int,
    signs: int,
    scale: np.float32,
    out: npt.NDArray[np.float32],
    start: int,
) -> None:
    """Fill out[start : start + 8] with the points of two indices; bit i of signs negates element i."""
    for i in range(GROUP):
        out[start + i] = _with_sign(scale * values[GROUP * first + i], signs >> i)
        out[start + GROUP + i] = _with_sign(scale * values[GROUP * second + i], signs >> GROUP + i)


@inlinable
def _with_sign(value: np.float32, sign: int) -> np.float32:
    """Return value, negated if the lowest bit of sign is set; a NaN too."""
    return from_bits(bits(value) ^ (sign & 1) << 31)
