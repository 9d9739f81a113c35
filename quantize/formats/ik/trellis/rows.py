"""The search of the trellis types: scales of sub-blocks, and the nearest point for each group of weights.

A sub-block of 32 is tried with several scales near a goal: a multiple of the fourth root of the mean fourth
power, in which the roots of costs are the weights. More than the root mean square it minds large weights,
which must not lie beyond all points. By chance each trial has nearer or farther points than the others, so
the best of many trials loses much less than one. After a trial, the scale that fits its points best replaces
the one that they were searched with. The scale of the row is fitted at the end.

A lane is a group of weights. Only the search of points takes one group at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from gguf_tools.format.ggml_types import GGMLType
from quantize.formats.base import Floats32
from quantize.formats.ik.trellis.nearest_point import search_of
from quantize.formats.ik.trellis.point_trees import PointTree, point_tree
from quantize.formats.ik.trellis.trellis import START, levels_of_lanes
from quantize.simd.constants import HALF, QUARTER, ZERO
from quantize.simd.kernel import inlined
from quantize.simd.lane_memory import gather, int_tile, load, store
from quantize.simd.lanes import (
    LANES,
    Floats,
    Ints,
    absolute,
    maximum,
    minimum,
    select,
    splat,
    square_root,
)
from quantize.simd.rounding import nearest_int

BLOCK_ELEMS = 32
"""Weights of a sub-block."""

REACH = np.float32(200)
"""Levels beyond which a weight is not told from a larger one; those of points end at 126."""

_PATIENCE = 0.4
"""How far behind the best trial another may fall, as a share of what the best one has still to lose."""


@dataclass(frozen=True)
class Trellis:
    """What distinguishes a trellis type from the others.

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


def rows_of(trellis: Trellis) -> Callable[..., None]:
    """Return what a kernel calls to encode rows as a trellis type."""
    dim, magnitudes, ends_again = trellis.dim, trellis.magnitudes, trellis.ends_again
    nearest = search_of(dim, (1 << trellis.bits) // LANES**2, trellis.kept_nodes, trellis.kept_leaves)
    fours, pairs = dim // 4, dim // 2
    per_block = BLOCK_ELEMS // dim
    blocks = LANES // per_block
    size = LANES * dim
    points_a_tree = 1 << trellis.bits
    second_start = trellis.starts[-1] - trellis.starts[0]
    goal_factor, reach = np.float32(trellis.goal), np.float32(trellis.reach)

    @inlined
    def block_sums(lanes: Floats32, sums: Floats32) -> None:
        """Add up the lanes of each sub-block."""
        for b in range(blocks):
            total = ZERO
            for lane in range(b * per_block, (b + 1) * per_block):
                total += lanes[lane]
            sums[b] = total

    @inlined
    def set_goals(x: Any, costs: Any, row: int, n_chunks: int, goals: Any, lanes: Any, sums: Any) -> Any:
        """Fill goals[:] with those of the sub-blocks of a row, and return the largest."""
        largest = ZERO
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
    def set_targets(
        x: Any, at: int, steps: Any, step_at: int, inverse: Floats, wholes: Any, targets: Any
    ) -> None:
        """Divide a chunk of weights by scales, as `nearest` takes them."""
        exact, whole = int_tile(dim), int_tile(dim)
        for j in range(dim):
            value = load(x, at + LANES * j) * inverse
            value = minimum(maximum(value, -REACH), REACH)
            # products of points are rounded down, so half a unit is taken off
            exact[j] = nearest_int(value * load(steps, step_at + LANES * j) - HALF)
            whole[j] = minimum(maximum(nearest_int(value * HALF - QUARTER) + 64, 0), 127)
        for f in range(fours):
            j = 4 * f
            wholes[f] = whole[j] | whole[j + 1] << 8 | whole[j + 2] << 16 | whole[j + 3] << 24
            targets[2 * f] = (exact[j] & 0xFFFF) | exact[j + 2] << 16
            targets[2 * f + 1] = (exact[j + 1] & 0xFFFF) | exact[j + 3] << 16

    @inlined
    def numbers_of(slots: Ints, numbers: Any) -> Ints:
        """Return where the walks of points start."""
        number = gather(numbers, slots) + START
        if second_start:
            number = select(slots >= points_a_tree, number + second_start, number)
        return number

    @inlined
    def set_sums(
        x: Any, at: int, costs: Any, cost_at: int, number: Ints, lanes: Any, products: Any, squares: Any
    ) -> None:
        """Fill products and squares with the weighted sums of x * level and level**2 of each sub-block."""
        product, square = splat(ZERO), splat(ZERO)
        for j in range(dim):
            number, level = levels_of_lanes(number)
            if magnitudes:
                level = absolute(level)
            weighed = load(costs, cost_at + LANES * j) * level
            product = product + weighed * load(x, at + LANES * j)
            square = square + weighed * level
        store(lanes, 0, product)
        block_sums(lanes, products)
        store(lanes, 0, square)
        block_sums(lanes, squares)

    @inlined
    def encode_rows(
        x: Floats32, costs: Floats32, steps: Floats32, roots: Any, units: Floats32,
        levels: Floats32, factors: Floats32, trees: Any,
        points: Any, leaf_boxes: Any, node_boxes: Any, numbers: Any,
        scales: Floats32, codes: Any, starts: Any, indices: Any,
    ) -> None:  # fmt: skip
        """Encode rows whose largest magnitude is 1 or 0.

        The weights come in chunks of LANES groups: the first weight of each group, the second of each ...

        x, costs, steps  by chunk, weight of the group, group; costs and steps are those of one row
        roots, units     by group; see Measure of trellis_encoding.py
        factors, trees   the trials
        points .. numbers  arrays of the tree
        scales           float32 (n_rows,) to be filled
        codes, starts    int32 (n_rows * sub-blocks,) to be filled: numbers of levels and of starts
        indices          int32 (n_rows * groups,) to be filled
        """
        n_chunks = costs.size // size
        n_blocks = n_chunks * blocks
        goals = np.empty(n_blocks, np.float32)
        products, squares = np.empty(n_blocks, np.float32), np.empty(n_blocks, np.float32)
        lanes, inverse = np.empty(LANES, np.float32), np.empty(LANES, np.float32)
        new_products, new_squares = np.empty(blocks, np.float32), np.empty(blocks, np.float32)
        slots, best_slots = np.zeros(LANES, np.int32), np.zeros(LANES, np.int32)
        spent, limits = np.empty(LANES, np.float64), np.empty(LANES, np.float64)
        losses, gains, unit = np.empty(blocks), np.empty(blocks, np.float32), np.empty(blocks)
        code, tree = np.empty(blocks, np.int64), np.empty(blocks, np.int64)
        wholes, targets = int_tile(fours), int_tile(pairs)
        for row in range(scales.size):
            largest = set_goals(x, costs, row, n_chunks, goals, lanes, new_products)
            scales[row] = 0
            if largest == 0:
                continue
            d = largest / reach
            for c in range(n_chunks):
                first = row * n_blocks + c * blocks
                at = (row * n_chunks + c) * size
                for b in range(blocks):
                    gains[b] = np.inf
                for lane in range(LANES):
                    limits[lane] = np.inf
                for trial in range(len(factors) + ends_again):
                    for b in range(blocks):
                        losses[b] = 0
                        if trial < len(factors):
                            factor = factors[trial]
                            code[b] = _nearest_level(levels, factor * goals[c * blocks + b] / d)
                            if levels[code[b]] == 0:
                                code[b] += 1 if factor > 0 else -1
                            tree[b] = trees[trial]
                        else:
                            code[b] = codes[first + b]
                            tree[b] = starts[first + b]
                            for lane in range(b * per_block, (b + 1) * per_block):
                                limits[lane] = np.inf
                            if levels[code[b]] == 0:
                                losses[b] = np.inf
                        scale = d * levels[code[b]]
                        unit[b] = np.float64(scale) * scale
                        for lane in range(b * per_block, (b + 1) * per_block):
                            inverse[lane] = 1 / scale if scale != 0 else ZERO
                    set_targets(x, at, steps, c * size, load(inverse, 0), wholes, targets)
                    for lane in range(LANES):
                        b = lane // per_block
                        if losses[b] < limits[lane]:
                            group = c * LANES + lane
                            distance, slot = nearest(
                                points, leaf_boxes, node_boxes, tree[b], roots, group, wholes, targets, lane
                            )
                            slots[lane] = slot
                            losses[b] += distance * unit[b] * units[group]
                            spent[lane] = losses[b]
                        else:
                            losses[b] = np.inf
                    number = numbers_of(load(slots, 0), numbers)
                    set_sums(x, at, costs, c * size, number, lanes, new_products, new_squares)
                    for b in range(blocks):
                        if losses[b] == np.inf:
                            continue
                        product, square = new_products[b], new_squares[b]
                        if square > 0:
                            code[b] = _nearest_level(levels, product / square / d)
                        scale = d * levels[code[b]]
                        gain = (scale * square - 2 * product) * scale
                        if gain < gains[b]:
                            gains[b] = gain
                            products[c * blocks + b], squares[c * blocks + b] = product, square
                            codes[first + b], starts[first + b] = code[b], tree[b]
                            before = 0.0
                            for lane in range(b * per_block, (b + 1) * per_block):
                                best_slots[lane] = slots[lane]
                                limits[lane] = before + _PATIENCE * (losses[b] - before)
                                before = spent[lane]
                store(indices, (row * n_chunks + c) * LANES, gather(numbers, load(best_slots, 0)))
            above, below = ZERO, ZERO
            for b in range(n_blocks):
                scale = levels[codes[row * n_blocks + b]]
                above += scale * products[b]
                below += scale * scale * squares[b]
            scales[row] = above / below if below > 0 else d

    return encode_rows
