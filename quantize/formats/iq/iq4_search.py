"""Parts that IQ4_NL and IQ4_XS share: sixteen levels, closer together near zero, and the search for a scale.

A code q of 4 bits stands for LEVELS[q], and a weight is scale * LEVELS[q]. A number counts as the level it is
nearest to, the upper one of equals; a NaN as the last.

ggml's quantize_row_iq4_nl_impl tries sixteen inverse scales on each sub-block. The first gives the weight
of largest magnitude the level 127 (there is none, it becomes 113), the other fifteen lie around the one that
gives it the level -127. From the first of these to the last, each weight times the inverse scale shrinks by
a tenth, while the edges between levels are a fifth or more apart. So a weight meets at most one edge in all
fifteen, and has one level outside of it and one inside: `_split` finds these once, and a trial is then one
comparison per weight. It decides as the reference does, because rounding is monotone.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from quantize.formats.search import EMPTY, farthest_from_zero
from quantize.simd.floats import INFINITY, ONE, ZERO
from quantize.simd.kernel import inlinable
from quantize.simd.lane_memory import FloatTile, beside, float_tile, tail, zero_like
from quantize.simd.lanes import Floats, Ints, Mask, absolute, select, splat

ELEMS = 32

LEVELS = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32)
"""The levels, ggml's kvalues_iq4nl."""

EDGES = (LEVELS[:-1] + LEVELS[1:]) / np.float32(2)
"""The values at which the nearest level changes: from EDGES[k] on it is LEVELS[k + 1]."""

_INNERMOST = LEVELS[8]  # the level of zero
# the levels beyond it on either side, from inside out, and the magnitudes from which on each is nearest;
# what lies on a negative edge belongs inside
_LEVELS_ABOVE = np.append(LEVELS[9:], LEVELS[15])
_EDGES_ABOVE = np.append(EDGES[8:], INFINITY)
_LEVELS_BELOW = LEVELS[7::-1].copy()
_EDGES_BELOW = np.nextafter(-EDGES[7::-1], INFINITY)

_TOP = np.float32(127)
_TRIALS = 15
_MIDDLE = 7


@inlinable
def nearest_level(value: Floats) -> Floats:
    """Return the levels nearest to `value`."""
    level = splat(LEVELS[0])
    for k in range(15):
        level = select(value < EDGES[k], level, LEVELS[k + 1])
    return level


@inlinable
def nearest_code(value: Floats) -> Ints:
    """Return the codes of the levels nearest to `value`."""
    code = splat(0)
    for k in range(15):
        code = select(value < EDGES[k], code, k + 1)
    return code


@inlinable
def levels_of(codes: Ints) -> Floats:
    """Return LEVELS[codes]; a tree of choices, which takes a third of the time of a gather."""
    quarters = float_tile(4)
    for k in range(4):
        low = select((codes & 1) != 0, splat(LEVELS[4 * k + 1]), LEVELS[4 * k])
        high = select((codes & 1) != 0, splat(LEVELS[4 * k + 3]), LEVELS[4 * k + 2])
        quarters[k] = select((codes & 2) != 0, high, low)
    low = select((codes & 4) != 0, quarters[1], quarters[0])
    high = select((codes & 4) != 0, quarters[3], quarters[2])
    return select((codes & 8) != 0, high, low)


class Split(NamedTuple):
    """A sub-block in the fifteen trials: Tiles of Floats, one vector per weight.

    magnitudes          |x|
    edges               the level is the outer one where |x| times the inverse scale reaches this
    outer_lx, inner_lx  importance * level * x with either level
    outer_l2, inner_l2  importance * level**2 with either level
    """

    magnitudes: FloatTile
    edges: FloatTile
    outer_lx: FloatTile
    inner_lx: FloatTile
    outer_l2: FloatTile
    inner_l2: FloatTile


@inlinable
def _split(x: FloatTile, weights: FloatTile, widest: Floats, flipped: Mask, split: Split) -> None:
    """Fill `split`, given the magnitude of the first trial's inverse scale and where its sign is negative."""
    for i in range(ELEMS):
        magnitude = absolute(x[i])
        reach = widest * magnitude
        below = flipped ^ (x[i] < ZERO)
        edge = splat(INFINITY)
        inner = splat(_INNERMOST)
        outer = inner
        for k in range(8):
            next_edge = select(below, splat(_EDGES_BELOW[k]), _EDGES_ABOVE[k])
            beyond = reach >= next_edge
            edge = select(beyond, next_edge, edge)
            inner = select(beyond, outer, inner)
            outer = select(beyond, select(below, splat(_LEVELS_BELOW[k]), _LEVELS_ABOVE[k]), outer)
        split.magnitudes[i] = magnitude
        split.edges[i] = edge
        split.outer_lx[i] = weights[i] * outer * x[i]
        split.inner_lx[i] = weights[i] * inner * x[i]
        split.outer_l2[i] = weights[i] * outer * outer
        split.inner_l2[i] = weights[i] * inner * inner


@inlinable
def _try(split: Split, inverse: Floats) -> tuple[Floats, Floats]:
    """Return the sums of importance * level * x and of importance * level**2 for an inverse scale."""
    sum_lx = zero_like(split.edges)
    sum_l2 = zero_like(split.edges)
    for i in range(ELEMS):
        outside = split.magnitudes[i] * inverse >= split.edges[i]
        sum_lx += select(outside, split.outer_lx[i], split.inner_lx[i])
        sum_l2 += select(outside, split.outer_l2[i], split.inner_l2[i])
    return sum_lx, sum_l2


@inlinable
def _twice(split: Split) -> Split:
    """Return `split` with each vector doubled, for two trials at once."""
    return Split(
        beside(split.magnitudes, 0),
        beside(split.edges, 0),
        beside(split.outer_lx, 0),
        beside(split.inner_lx, 0),
        beside(split.outer_l2, 0),
        beside(split.inner_l2, 0),
    )


@inlinable
def search_levels(x: FloatTile, weights: FloatTile) -> Floats:
    """Return the scale with x ~ scale * level for 32 finite elements; 0 where all of x counts as zero."""
    largest, extreme = farthest_from_zero(x, ELEMS)
    empty = largest < EMPTY

    inverse = ONE / (extreme / _TOP)
    sum_lx = splat(ZERO)
    sum_l2 = splat(ZERO)
    for i in range(ELEMS):
        level = nearest_level(inverse * x[i])
        sum_lx += weights[i] * level * x[i]
        sum_l2 += weights[i] * level * level
    scale = select(sum_l2 > ZERO, sum_lx / sum_l2, ZERO)
    best = scale * sum_lx

    split = Split(
        float_tile(32), float_tile(32), float_tile(32), float_tile(32), float_tile(32), float_tile(32)
    )
    _split(x, weights, np.float32(_TOP + _MIDDLE) / largest, extreme > ZERO, split)
    fours = _twice(_twice(split))
    inverses, sums_lx, sums_l2 = float_tile(16), float_tile(16), float_tile(16)
    for k in range(_TRIALS + 1):  # the last one is there twice, to make sixteen
        inverses[k] = (_TOP + np.float32(_MIDDLE - min(k, _TRIALS - 1))) / largest
    for k in range(0, _TRIALS, 4):
        four_lx, four_l2 = _try(fours, beside(beside(tail(inverses, k), 1), 2)[0])
        beside(beside(tail(sums_lx, k), 1), 2)[0] = four_lx
        beside(beside(tail(sums_l2, k), 1), 2)[0] = four_l2
    for k in range(_TRIALS):
        sum_lx = sums_lx[k]
        sum_l2 = sums_l2[k]
        better = (sum_l2 > ZERO) & (sum_lx * sum_lx > best * sum_l2)
        scale = select(better, sum_lx / sum_l2, scale)
        best = select(better, scale * sum_lx, best)
    return select(empty, ZERO, scale)
