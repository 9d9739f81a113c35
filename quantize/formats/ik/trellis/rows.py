"""The search of the trellis types: scales of sub-blocks, and the nearest point for each group of weights.

A sub-block of 32 is tried with several scales near a goal: a multiple of the fourth root of the mean fourth
power, in which the roots of costs are the weights. More than the root mean square it minds large weights,
which must not lie beyond all points. By chance each trial has nearer or farther points than the others, so
the best of many trials loses much less than one. After a trial, the scale that fits its points best replaces
the one that they were searched with. The scale of the row is fitted at the end.

A lane is a group of weights. Only the search of points takes one group at a time.

Arrays travel in named tuples. Each function takes out those that its loops need before they begin: taking an
array out of a tuple counts references, and inside the loops this cost a fifth of the speed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from gguf_tools.format.ggml_types import GGMLType
from quantize.formats.base import Floats32
from quantize.formats.ik.trellis.nearest_point import Int32s, PointTree, Targets, point_tree, search_of
from quantize.formats.ik.trellis.trellis import START, levels_of_lanes
from quantize.simd.floats import HALF, QUARTER, ZERO, nearest_int
from quantize.simd.kernel import inlined
from quantize.simd.lane_memory import gather, int_tile, load, store
from quantize.simd.lanes import LANES, Floats, Ints, absolute, maximum, minimum, select, splat, square_root

Floats64 = npt.NDArray[np.float64]

BLOCK_ELEMS = 32
"""Weights of a sub-block."""

REACH = np.float32(200)
"""Levels beyond which a weight is not told from a larger one; those of points end at 126."""

_PATIENCE = 0.4
"""How far behind the best trial another may fall, as a share of what the best one has still to lose."""


@dataclass(frozen=True)
class Trellis:
    """Properties that distinguish a trellis type from the others.

    type         its id, name and sizes
    bits         of an index
    dim          weights of a group
    levels       levels that a scale can have, float32, ascending
    goal         scale to try, as a multiple of the mean fourth power's root
    reach        level of the largest goal of a row
    trials       (multiple of the goal, number of the start) of each trial
    kept_nodes   how many nodes of the tree are searched; see `search_of`
    kept_leaves  how many leaves of each lane are searched
    magnitudes   whether points are magnitudes, and signs are stored beside them
    starts       what is added to an index
    ends_again   whether the best trial's points are searched once more, with the scale that fits them
    """

    type: GGMLType
    bits: int
    dim: int
    levels: Floats32
    goal: float
    reach: float
    trials: tuple[tuple[float, int], ...]
    kept_nodes: int
    kept_leaves: int
    magnitudes: bool = False
    starts: tuple[int, ...] = (START,)
    ends_again: bool = False

    def tree(self) -> PointTree:
        """Return its points."""
        return point_tree(self.bits, self.dim, self.magnitudes, self.starts)


@inlined
def _nearest_level(levels: Floats32, value: np.float32) -> int:
    """Return the number of the level nearest to a value."""
    low, high = 0, len(levels) - 1
    while low < high:
        middle = (low + high) // 2
        if levels[middle] + levels[middle + 1] < 2 * value:
            low = middle + 1
        else:
            high = middle
    return low


class Measured(NamedTuple):
    """Weights in chunks of LANES groups: the first weight of each group, the second of each ...

    x             by row, chunk, weight of the group, group; the largest magnitude of a row is 1 or 0
    costs, steps  by chunk, weight of the group, group
    roots, units  by group; `_measured` of encoding.py makes them
    """

    x: Floats32
    costs: Floats32
    steps: Floats32
    roots: Int32s
    units: Floats32


class Trials(NamedTuple):
    """Trials for each sub-block: the level nearest to factor * goal, with the points of a tree."""

    levels: Floats32
    factors: Floats32
    trees: Int32s


class RowCodes(NamedTuple):
    """Arrays that a search fills.

    scales         float32 (n_rows,)
    codes, starts  int32 (n_rows * sub-blocks,): numbers of levels and of starts
    indices        int32 (n_rows * groups,)
    """

    scales: Floats32
    codes: Int32s
    starts: Int32s
    indices: Int32s


class Task(NamedTuple):
    """Arguments of `encode_rows`."""

    measured: Measured
    trials: Trials
    tree: PointTree
    output: RowCodes


class _Chunk(NamedTuple):
    """LANES groups of one row.

    number  of the chunk in the row
    at      where its weights begin
    first   number of its first sub-block among all rows'
    d       scale of the row, as it is assumed for the search
    """

    number: int
    at: int
    first: int
    d: np.float32


class _Trial(NamedTuple):
    """A trial, by sub-block of a chunk.

    code, tree         numbers of the level and of the start
    loss               so far; infinite where the trial was given up
    unit               what a squared distance of 1 costs
    products, squares  sums of cost * x * level and of cost * level**2
    gains              the best so far
    """

    code: npt.NDArray[np.int64]
    tree: npt.NDArray[np.int64]
    loss: Floats64
    unit: Floats64
    products: Floats32
    squares: Floats32
    gains: Floats32


class _Lanes(NamedTuple):
    """The same trial by group of a chunk.

    inverse      1 / scale
    slots, best  places of points: this trial's, and the best one's
    spent        losses of the sub-block up to the group
    limits       what these must stay below
    sums         room for what is added up by sub-block
    """

    inverse: Floats32
    slots: Int32s
    best: Int32s
    spent: Floats64
    limits: Floats64
    sums: Floats32


class _State(NamedTuple):
    """A row's goals and the sums of its best trials, by sub-block, and the present trial."""

    goals: Floats32
    products: Floats32
    squares: Floats32
    trial: _Trial
    lanes: _Lanes


def _sums_of(trellis: Trellis) -> Any:
    """Return two functions of kernels that add up by sub-block.

    set_goals(measured, row, state) -> float32
        fills the goals of a row, and returns the largest
    set_sums(measured, chunk, state, number)
        fills the products and squares of a trial, given the numbers that its walks start from
    """
    dim, magnitudes, goal_factor = trellis.dim, trellis.magnitudes, np.float32(trellis.goal)
    per_block, size, blocks = BLOCK_ELEMS // dim, LANES * dim, LANES * dim // BLOCK_ELEMS

    @inlined
    def block_sums(lanes: Floats32, sums: Floats32) -> None:
        """Add up the lanes of each sub-block."""
        for b in range(blocks):
            total = ZERO
            for lane in range(b * per_block, (b + 1) * per_block):
                total += lanes[lane]
            sums[b] = total

    @inlined
    def set_goals(measured: Measured, row: int, state: _State) -> np.float32:
        goals, sums, lanes = state.goals, state.trial.products, state.lanes.sums
        x, costs = measured.x, measured.costs
        largest, n_chunks = ZERO, costs.size // size
        for c in range(n_chunks):
            power, total = splat(ZERO), splat(ZERO)
            for j in range(dim):
                square = load(x, (row * n_chunks + c) * size + LANES * j)
                square = square * square
                root = square_root(load(costs, c * size + LANES * j))
                power = power + root * (square * square)
                total = total + root
            store(lanes, 0, power)
            block_sums(lanes, sums)
            store(lanes, 0, total)
            block_sums(lanes, goals[c * blocks :])
            for b in range(blocks):
                mean = sums[b] / goals[c * blocks + b]
                goals[c * blocks + b] = goal_factor * np.sqrt(np.sqrt(mean))
                largest = max(largest, goals[c * blocks + b])
        return largest

    @inlined
    def set_sums(measured: Measured, chunk: _Chunk, state: _State, number: Ints) -> None:
        x, costs, lanes = measured.x, measured.costs, state.lanes.sums
        product, square = splat(ZERO), splat(ZERO)
        for j in range(dim):
            number, level = levels_of_lanes(number)
            if magnitudes:
                level = absolute(level)
            weighed = load(costs, chunk.number * size + LANES * j) * level
            product = product + weighed * load(x, chunk.at + LANES * j)
            square = square + weighed * level
        store(lanes, 0, product)
        block_sums(lanes, state.trial.products)
        store(lanes, 0, square)
        block_sums(lanes, state.trial.squares)

    return set_goals, set_sums


def _points_of(trellis: Trellis) -> Any:
    """Return the function of kernels that finds the points of a chunk for the scales of a trial.

        find_points(task, chunk, state) -> Ints, the numbers that their walks start from

    A sub-block that falls behind its limit gets an infinite loss.
    """
    dim, size = trellis.dim, LANES * trellis.dim
    fours, pairs, per_block = dim // 4, dim // 2, BLOCK_ELEMS // dim
    nearest = search_of(dim, (1 << trellis.bits) // LANES**2, trellis.kept_nodes, trellis.kept_leaves)
    points_a_tree, second_start = 1 << trellis.bits, trellis.starts[-1] - trellis.starts[0]

    @inlined
    def set_targets(measured: Measured, chunk: _Chunk, inverse: Floats, targets: Targets) -> None:
        """Divide the weights by scales, as `nearest` takes them."""
        exact, whole = int_tile(dim), int_tile(dim)
        x, steps = measured.x, measured.steps
        for j in range(dim):
            value = load(x, chunk.at + LANES * j) * inverse
            value = minimum(maximum(value, -REACH), REACH)
            # products of points are rounded down, so half a unit is taken off
            exact[j] = nearest_int(value * load(steps, chunk.number * size + LANES * j) - HALF)
            whole[j] = minimum(maximum(nearest_int(value * HALF - QUARTER) + 64, 0), 127)
        for f in range(fours):
            j = 4 * f
            targets.wholes[f] = whole[j] | whole[j + 1] << 8 | whole[j + 2] << 16 | whole[j + 3] << 24
            targets.pairs[2 * f] = (exact[j] & 0xFFFF) | exact[j + 2] << 16
            targets.pairs[2 * f + 1] = (exact[j + 1] & 0xFFFF) | exact[j + 3] << 16

    @inlined
    def find_points(task: Task, chunk: _Chunk, state: _State) -> Ints:
        targets = Targets(int_tile(fours), int_tile(pairs))
        set_targets(task.measured, chunk, load(state.lanes.inverse, 0), targets)
        points, leaf_boxes, node_boxes, numbers = task.tree
        roots, units = task.measured.roots, task.measured.units
        trees, loss, unit = state.trial.tree, state.trial.loss, state.trial.unit
        found, spent, limits = state.lanes.slots, state.lanes.spent, state.lanes.limits
        for lane in range(LANES):
            b = lane // per_block
            if loss[b] < limits[lane]:
                group = chunk.number * LANES + lane
                distance, slot = nearest(
                    points, leaf_boxes, node_boxes, trees[b], roots, group, targets, lane
                )
                found[lane] = slot
                loss[b] += distance * unit[b] * units[group]
                spent[lane] = loss[b]
            else:
                loss[b] = np.inf
        slots = load(found, 0)
        number = gather(numbers, slots) + START
        if second_start:
            number = select(slots >= points_a_tree, number + second_start, number)
        return number

    return find_points


def _trials_of(trellis: Trellis) -> Any:
    """Return two functions of kernels, for what is before and after the search of a trial's points.

    begin(task, chunk, state, number)
        sets up a trial
    keep_better(task, chunk, state)
        keeps what is the best so far in the output and in `state`
    """
    per_block, blocks = BLOCK_ELEMS // trellis.dim, LANES * trellis.dim // BLOCK_ELEMS

    @inlined
    def begin(task: Task, chunk: _Chunk, state: _State, number: int) -> None:
        levels, factors, trees = task.trials
        codes, tree, loss, unit = state.trial.code, state.trial.tree, state.trial.loss, state.trial.unit
        goals, inverse, limits = state.goals, state.lanes.inverse, state.lanes.limits
        best_codes, best_starts = task.output.codes, task.output.starts
        for b in range(blocks):
            loss[b] = 0
            if number < len(factors):
                factor = factors[number]
                codes[b] = _nearest_level(levels, factor * goals[chunk.number * blocks + b] / chunk.d)
                if levels[codes[b]] == 0:
                    codes[b] += 1 if factor > 0 else -1
                tree[b] = trees[number]
            else:
                codes[b], tree[b] = best_codes[chunk.first + b], best_starts[chunk.first + b]
                for lane in range(b * per_block, (b + 1) * per_block):
                    limits[lane] = np.inf
                if levels[codes[b]] == 0:
                    loss[b] = np.inf
            scale = chunk.d * levels[codes[b]]
            unit[b] = np.float64(scale) * scale
            for lane in range(b * per_block, (b + 1) * per_block):
                inverse[lane] = 1 / scale if scale != 0 else ZERO

    @inlined
    def keep_better(task: Task, chunk: _Chunk, state: _State) -> None:
        levels = task.trials.levels
        codes, tree, loss, _unit, new_products, new_squares, gains = state.trial
        _inverse, slots, best, spent, limits, _sums = state.lanes
        products, squares = state.products[chunk.number * blocks :], state.squares[chunk.number * blocks :]
        best_codes, best_starts = task.output.codes, task.output.starts
        for b in range(blocks):
            if loss[b] == np.inf:
                continue
            product, square = new_products[b], new_squares[b]
            if square > 0:
                codes[b] = _nearest_level(levels, product / square / chunk.d)
            scale = chunk.d * levels[codes[b]]
            gain = (scale * square - 2 * product) * scale
            if gain < gains[b]:
                gains[b] = gain
                products[b], squares[b] = product, square
                best_codes[chunk.first + b], best_starts[chunk.first + b] = codes[b], tree[b]
                before = 0.0
                for lane in range(b * per_block, (b + 1) * per_block):
                    best[lane] = slots[lane]
                    limits[lane] = before + _PATIENCE * (loss[b] - before)
                    before = spent[lane]

    return begin, keep_better


@inlined
def _new_state(n_blocks: int, blocks: int) -> _State:
    """Return room for a row of `n_blocks` sub-blocks, `blocks` of them in a chunk."""
    singles = np.empty((3, blocks), np.float32)
    doubles = np.empty((2, LANES))
    return _State(
        np.empty(n_blocks, np.float32),
        np.empty(n_blocks, np.float32),
        np.empty(n_blocks, np.float32),
        _Trial(
            np.empty(blocks, np.int64),
            np.empty(blocks, np.int64),
            np.empty(blocks),
            np.empty(blocks),
            singles[0],
            singles[1],
            singles[2],
        ),
        _Lanes(
            np.empty(LANES, np.float32),
            np.zeros(LANES, np.int32),
            np.zeros(LANES, np.int32),
            doubles[0],
            doubles[1],
            np.empty(LANES, np.float32),
        ),
    )


def rows_of(trellis: Trellis) -> Callable[..., None]:
    """Return the function that encodes rows as a trellis type, to be compiled: encode_rows(task)."""
    set_goals, set_sums = _sums_of(trellis)
    find_points, (begin, keep_better) = _points_of(trellis), _trials_of(trellis)
    size, blocks = LANES * trellis.dim, LANES * trellis.dim // BLOCK_ELEMS
    ends_again, reach = trellis.ends_again, np.float32(trellis.reach)

    @inlined
    def encode_chunk(task: Task, chunk: _Chunk, state: _State) -> None:
        state.trial.gains[:] = np.inf
        state.lanes.limits[:] = np.inf
        for number in range(len(task.trials.factors) + ends_again):
            begin(task, chunk, state, number)
            starts = find_points(task, chunk, state)
            set_sums(task.measured, chunk, state, starts)
            keep_better(task, chunk, state)

    @inlined
    def fitted_scale(levels: Floats32, codes: Int32s, state: _State, d: np.float32) -> np.float32:
        """Return the scale of a row that fits the best trials' points best; d where they are all 0."""
        above, below = ZERO, ZERO
        for b in range(len(codes)):
            scale = levels[codes[b]]
            above += scale * state.products[b]
            below += scale * scale * state.squares[b]
        return above / below if below > 0 else d

    def encode_rows(task: Task) -> None:
        measured, output = task.measured, task.output
        n_chunks = measured.costs.size // size
        n_blocks = n_chunks * blocks
        state = _new_state(n_blocks, blocks)
        for row in range(output.scales.size):
            largest = set_goals(measured, row, state)
            output.scales[row] = 0
            if largest == 0:
                continue
            d = largest / reach
            for c in range(n_chunks):
                place = row * n_chunks + c
                encode_chunk(task, _Chunk(c, place * size, place * blocks, d), state)
                best = gather(task.tree.numbers, load(state.lanes.best, 0))
                store(output.indices, place * LANES, best)
            codes = output.codes[row * n_blocks : (row + 1) * n_blocks]
            output.scales[row] = fitted_scale(task.trials.levels, codes, state, d)

    return encode_rows
