"""Grids as trees, and walks through them: every point judged under feedback, LANES rows at a time.

Points that begin with the same levels share the nodes of that beginning, so what it costs is computed once.

A walk rounds the elements of a group in order. The error of an element is taken off the later elements of the
group, as feedback takes it off all later columns, so a point costs the sum of its squared errors. Everything
is in units of U[i, i]: what is left of element i is w'[i] / U[i, i], and an error e there takes
e * U[i, j] / U[j, j] off element j.

    free    an element is plus or minus its level, whichever is nearer to what is left of it
    plain   an element is its level, which has a sign of its own
    even    as free, with an even count of minus signs: of the two ways to reach a node with either parity,
            a last plus sign or a last minus sign, the cheaper one goes on

A walk tells the code of its best point; octets.py goes the way to that point again.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from quantize.formats.iq.grids import Grid
from quantize.simd.kernel import inlined
from quantize.simd.lane_memory import FloatTile, IntTile
from quantize.simd.lanes import Floats, Mask, absolute, any_lane, bits, from_bits, minimum, select

LEVELS = 8
"""The places of an element in a Tile of steps; a grid has 3 or 8 levels."""

STRIDE = 256
"""The length of a row of ratios: the columns of a block."""

_SIGN = -0x80000000


class Tree(NamedTuple):
    """The nodes of a grid's points, those of each depth together, the root first.

    starts  int32 (n_nodes + 1,): the children of node n are starts[n] .. starts[n + 1] - 1; a leaf has none
    levels  int32 (n_nodes,): the level of the element that a node adds to its parent's; 0 for the root
    codes   int32 (n_nodes,): the code (see `Grid`) of all levels from the root; of a leaf, that of its point
    """

    starts: npt.NDArray[np.int32]
    levels: npt.NDArray[np.int32]
    codes: npt.NDArray[np.int32]


@cache
def tree(grid: Grid) -> Tree:
    """Build the tree of a grid: a node at depth k stands for the first k levels of some of its points."""
    points = grid.levels.astype(np.int64)
    depths = [np.zeros((1, 0), np.int64)]
    starts = []
    end = 1
    for depth in range(1, grid.size + 1):
        nodes = np.unique(points[:, :depth], axis=0)  # in ascending order, so siblings are together
        is_first = np.ones(len(nodes), bool)
        is_first[1:] = (nodes[1:, :-1] != nodes[:-1, :-1]).any(axis=1)
        starts.append(end + np.flatnonzero(is_first))
        depths.append(nodes)
        end += len(nodes)
    starts.append(np.full(len(points) + 1, end))
    levels = [nodes[:, -1] for nodes in depths[1:]]
    codes = [(nodes << grid.code_bits * np.arange(nodes.shape[1])).sum(axis=1) for nodes in depths]
    return Tree(
        starts=np.concatenate(starts).astype(np.int32),
        levels=np.concatenate([[0], *levels]).astype(np.int32),
        codes=np.concatenate(codes).astype(np.int32),
    )


class RoundedGroup(NamedTuple):
    """Points that a walk rounds a group of elements to.

    tree    the grid
    steps   Tile: steps[LEVELS * i + level] is what that level of element i stands for
    ratios  float32, flat: ratios[at + STRIDE * i + j] = U[i, j] / U[j, j] for elements i < j of the group
    """

    tree: Tree
    steps: FloatTile
    ratios: npt.NDArray[np.float32]
    at: int


class Way(NamedTuple):
    """How a walk came to its node: Tiles, by depth.

    rests  rests[8 * depth + i]: what is left of element i, for those from `depth` on
    costs  of the elements before `depth`
    """

    rests: FloatTile
    costs: FloatTile


class Best(NamedTuple):
    """The best point so far: Tiles of one vector."""

    costs: FloatTile
    codes: IntTile


@inlined
def with_sign_of(signed: Floats, magnitude: Floats) -> Floats:
    """Give a magnitude the sign of another number."""
    return from_bits(bits(magnitude) | bits(signed) & _SIGN)


@inlined
def _take(cost: Floats, code: int, best: Best) -> None:
    closer = cost < best.costs[0]
    best.costs[0] = select(closer, cost, best.costs[0])
    best.codes[0] = select(closer, code, best.codes[0])


# ---- free and plain --------------------------------------------------------------------------------


def _one_way_leaf(size: int, signed: bool) -> Any:
    depth = size - 1

    @inlined
    def step(group: RoundedGroup, way: Way, best: Best, node: int) -> None:
        tree, steps = group.tree, group.steps
        rest, cost = way.rests[8 * depth + depth], way.costs[depth]
        if signed:
            rest = absolute(rest)
        for child in range(tree.starts[node], tree.starts[node + 1]):
            error = rest - steps[LEVELS * depth + tree.levels[child]]
            _take(cost + error * error, tree.codes[child], best)

    return step


def _one_way_step(size: int, depth: int, signed: bool, deeper: Any) -> Any:
    prunes = depth == size // 2 - 1

    @inlined
    def step(group: RoundedGroup, way: Way, best: Best, node: int) -> None:
        tree = group.tree
        rest = way.rests[8 * depth + depth]
        for child in range(tree.starts[node], tree.starts[node + 1]):
            level = group.steps[LEVELS * depth + tree.levels[child]]
            if signed:
                level = with_sign_of(rest, level)
            error = rest - level
            cost = way.costs[depth] + error * error
            if prunes and not any_lane(cost < best.costs[0]):
                continue
            way.costs[depth + 1] = cost
            for i in range(depth + 1, size):
                ratio = group.ratios[group.at + STRIDE * depth + i]
                way.rests[8 * (depth + 1) + i] = way.rests[8 * depth + i] - error * ratio
            deeper(group, way, best, child)

    return step


def _one_way(size: int, signed: bool) -> Any:
    """Make walk(group, way, best, 0), free or plain; `way` comes with what is left at depth 0."""
    walk = _one_way_leaf(size, signed)
    for depth in range(size - 2, -1, -1):
        walk = _one_way_step(size, depth, signed, walk)
    return walk


free_walk_of_8 = _one_way(8, True)
free_walk_of_4 = _one_way(4, True)
plain_walk_of_8 = _one_way(8, False)


# ---- even ------------------------------------------------------------------------------------------


def _even_leaf(size: int) -> Any:
    depth = size - 1

    @inlined
    def step(group: RoundedGroup, even: Way, odd: Way, best: Best, node: int) -> None:
        tree = group.tree
        rest, cost = even.rests[8 * depth + depth], even.costs[depth]
        rest_odd, cost_odd = odd.rests[8 * depth + depth], odd.costs[depth]
        for child in range(tree.starts[node], tree.starts[node + 1]):
            level = group.steps[LEVELS * depth + tree.levels[child]]
            plus, minus = rest - level, rest_odd + level
            _take(minimum(cost + plus * plus, cost_odd + minus * minus), tree.codes[child], best)

    return step


@inlined
def go(group: RoundedGroup, depth: int, size: int, level: Floats, way: Way, other: Way, to: Way) -> Mask:
    """Go to a node of depth + 1 in `to`; return where by a plus sign from `way`, else minus from `other`."""
    plus = way.rests[8 * depth + depth] - level
    minus = other.rests[8 * depth + depth] + level
    cost, other_cost = way.costs[depth] + plus * plus, other.costs[depth] + minus * minus
    is_plus = cost <= other_cost
    error = select(is_plus, plus, minus)
    to.costs[depth + 1] = select(is_plus, cost, other_cost)
    for i in range(depth + 1, size):
        rest = select(is_plus, way.rests[8 * depth + i], other.rests[8 * depth + i])
        to.rests[8 * (depth + 1) + i] = rest - error * group.ratios[group.at + STRIDE * depth + i]
    return is_plus


def _even_step(size: int, depth: int, deeper: Any) -> Any:
    prunes = depth == size // 2 - 1

    @inlined
    def step(group: RoundedGroup, even: Way, odd: Way, best: Best, node: int) -> None:
        tree = group.tree
        for child in range(tree.starts[node], tree.starts[node + 1]):
            level = group.steps[LEVELS * depth + tree.levels[child]]
            go(group, depth, size, level, even, odd, even)
            go(group, depth, size, level, odd, even, odd)
            least = minimum(even.costs[depth + 1], odd.costs[depth + 1])
            if prunes and not any_lane(least < best.costs[0]):
                continue
            deeper(group, even, odd, best, child)

    return step


def _even(size: int) -> Any:
    """Make walk(group, even, odd, best, 0), of which `even` ends with an even count of minus signs.

    even, odd  the ways to the first element with either count, and what they cost; one may cost infinity,
               with rests that are finite numbers
    """
    walk = _even_leaf(size)
    for depth in range(size - 2, -1, -1):
        walk = _even_step(size, depth, walk)
    return walk


even_walk_of_8 = _even(8)
even_walk_of_4 = _even(4)
