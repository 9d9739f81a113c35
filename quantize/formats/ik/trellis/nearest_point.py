"""The levels of a trellis type as points in space, and the search of the point nearest to a group of weights.

An index of such a type (KT) stands for the levels of a group of 4 or 8 weights. Groups don't depend on each
other. So the best index is that of the nearest of 2**13 .. 2**16 points, in a space of 4 or 8 dimensions that
have weights.

LANES points that lie close together are a leaf, and LANES leaves a node. The points are halved along the
dimension in which they spread most, and the halves again, until LANES are left. The tree has the box around
the points of each leaf and each node.

The search looks at the boxes of all nodes, then at those of the leaves of the nearest nodes, then at the
points of the nearest leaves. How many are kept is fixed, and leaves are kept lane by lane, so nothing
branches. An exact search looks at fewer boxes and takes three times as long, because the processor can't
predict it. What is found is mostly the nearest point, and else one that is little farther;
docs/notes/kernels.md says how much.

Distances are sums of squares of 16-bit integers, the coordinates times the roots of their weights. Those of
boxes are coarse, as their coordinates are halved.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from quantize.formats.ik.trellis.trellis import START, walks
from quantize.simd.kernel import inlined
from quantize.simd.lane_items import (
    byte_excess,
    halves_swapped,
    item,
    least,
    lowest_bit,
    mask_word,
    pair_difference,
    pair_norm,
    pair_product,
)
from quantize.simd.lane_memory import IntTile, int_tile, load
from quantize.simd.lanes import LANES, Ints, lane_numbers, maximum, minimum, splat

Int32s = npt.NDArray[np.int32]


class PointTree(NamedTuple):
    """Points as a kernel reads them: n leaves of LANES points of `dim` coordinates, in int32 of four bytes.

    points      (n * LANES * dim / 4,)      by leaf, four dimensions, point: four coordinates with their sign
    leaf_boxes  (n * 2 * dim / 4,)          by node, four dimensions, lower or upper end, leaf: four
                                            coordinates plus 128, halved and rounded down
    node_boxes  (n * 2 * dim / 4 / LANES,)  by LANES nodes, likewise
    numbers     (n * LANES,)                the number of each point
    """

    points: Int32s
    leaf_boxes: Int32s
    node_boxes: Int32s
    numbers: Int32s


@cache
def point_tree(
    bits: int, dim: int, magnitudes: bool = False, starts: tuple[int, ...] = (START,)
) -> PointTree:
    """Return the points of all indices of `bits` bits, or their magnitudes, a tree for each start in turn."""
    trees = []
    for start in starts:
        levels = walks(start, 1 << bits, dim)
        trees.append(_tree_of(np.abs(levels) if magnitudes else levels))
    parts = zip(*trees, strict=True)
    return PointTree(*(np.concatenate(part) for part in parts))


def _tree_of(points: npt.NDArray[np.int64]) -> PointTree:
    numbers = _order(points)
    by_leaf = points[numbers].reshape(-1, LANES, points.shape[1])
    low, high = by_leaf.min(axis=1), by_leaf.max(axis=1)
    by_node = low.reshape(-1, LANES, low.shape[1]), high.reshape(-1, LANES, low.shape[1])
    return PointTree(
        _in_fours(by_leaf),
        _boxes(low, high),
        _boxes(by_node[0].min(axis=1), by_node[1].max(axis=1)),
        numbers.astype(np.int32),
    )


def _order(points: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the numbers of the points, leaf by leaf."""
    parts = np.arange(len(points))[np.newaxis]
    while parts.shape[1] > LANES:
        members = points[parts]
        count = members.shape[1]
        spread = count * (members**2).sum(axis=1) - members.sum(axis=1) ** 2
        along = np.take_along_axis(members, spread.argmax(axis=1)[:, np.newaxis, np.newaxis], axis=2)[:, :, 0]
        parts = np.take_along_axis(parts, along.argsort(axis=1, kind="stable"), axis=1)
        parts = parts.reshape(2 * len(parts), count // 2)
    by_node = parts.reshape(-1, LANES, LANES)
    # near leaves of neighbouring nodes are in similar places; the search wants them in different lanes
    turned = (np.arange(LANES) + _TURN * np.arange(len(by_node))[:, np.newaxis]) % LANES
    return np.take_along_axis(by_node, turned[:, :, np.newaxis], axis=1).reshape(-1)


def _in_fours(coordinates: npt.NDArray[np.int64]) -> Int32s:
    """Return (..., LANES, dim) as bytes, four dimensions after the other, as int32."""
    fours = coordinates.reshape(*coordinates.shape[:-1], -1, 4)
    return np.moveaxis(fours, -2, -3).astype(np.uint8).reshape(-1, 4).view(np.int32)[:, 0]


def _boxes(low: npt.NDArray[np.int64], high: npt.NDArray[np.int64]) -> Int32s:
    """Return boxes (n, dim), LANES at a time."""
    ends = np.stack([low, high], axis=1) + 128 >> 1
    dim = low.shape[1]
    by_four = ends.reshape(-1, LANES, 2, dim // 4, 4).transpose(0, 3, 2, 1, 4)
    return by_four.astype(np.uint8).reshape(-1, 4).view(np.int32)[:, 0]


_TURN = 5


_FARTHEST = 2**31 - 1
_UPPER_BYTES = 0xFF00FF00


class Targets(NamedTuple):
    """Weights for which points are sought, by lane.

    wholes  Ints: fours of bytes, the weights in levels plus 128, halved
    pairs   Ints: pairs, the weights in levels times the roots of their weights
    """

    wholes: IntTile
    pairs: IntTile


@inlined
def _insert(kept: IntTile, count: int, key: Ints) -> None:
    """Put a key among the `count` least of each lane, in ascending order."""
    for m in range(count):
        lower = minimum(kept[m], key)
        key = maximum(kept[m], key)
        kept[m] = lower


def _distances_of(dim: int) -> Any:
    """Return the functions of kernels that measure: both return squared distances.

    box_distances(boxes, at, roots, whole)
        from the LANES boxes from boxes[at] on, a quarter of what they are
    point_distances(points, at, roots, target)
        from the LANES points from points[at] on
    """
    fours = dim // 4

    @inlined
    def box_distances(boxes: Int32s, at: int, roots: IntTile, whole: IntTile) -> Ints:
        total = splat(0)
        for f in range(fours):
            below = byte_excess(load(boxes, at + 2 * LANES * f), whole[f])
            above = byte_excess(whole[f], load(boxes, at + 2 * LANES * f + LANES))
            outside = below | above
            even = pair_product((outside << 8) & _UPPER_BYTES, roots[2 * f])
            odd = pair_product(outside & _UPPER_BYTES, roots[2 * f + 1])
            total = total + pair_norm(even) + pair_norm(odd)
        return total

    @inlined
    def point_distances(points: Int32s, at: int, roots: IntTile, target: IntTile) -> Ints:
        total = splat(0)
        for f in range(fours):
            levels = load(points, at + LANES * f)
            even = pair_product((levels << 8) & _UPPER_BYTES, roots[2 * f])
            odd = pair_product(levels & _UPPER_BYTES, roots[2 * f + 1])
            total = total + pair_norm(pair_difference(even, target[2 * f]))
            total = total + pair_norm(pair_difference(odd, target[2 * f + 1]))
        return total

    return box_distances, point_distances


def search_of(dim: int, n_nodes: int, kept_nodes: int, kept_leaves: int) -> Callable[..., Any]:
    """Return the search for points of `dim` dimensions in trees of `n_nodes` nodes.

        nearest(points, leaf_boxes, node_boxes, tree, all_roots, group, targets, lane)

    It returns a near point's squared distance, and its place in the trees.

    points ..    arrays of `point_tree`; tree is the number of the tree
    all_roots    int32, `dim` / 2 for each group: roots of weights times 256, below 2**15, in pairs
    group        number of the group

    kept_nodes   how many nodes are searched: LANES / 2, LANES or a multiple
    kept_leaves  how many leaves of each lane are searched, at most 4
    """
    box_distances, point_distances = _distances_of(dim)
    fours, pairs, vectors = dim // 4, dim // 2, n_nodes // LANES
    leaf_size, box_size = LANES * fours, 2 * LANES * fours
    rounds = max(kept_nodes // LANES, 1)
    node_ids, leaf_ids, slot_ids = n_nodes - 1, kept_nodes - 1, 4 * LANES - 1

    @inlined
    def nearest(
        points: Int32s, leaf_boxes: Int32s, node_boxes: Int32s, tree: int,
        all_roots: Int32s, group: int, targets: Targets, lane: int,
    ) -> Any:  # fmt: skip
        roots, target, whole = int_tile(pairs), int_tile(pairs), int_tile(fours)
        for p in range(pairs):
            roots[p] = splat(all_roots[pairs * group + p])
            target[p] = splat(item(targets.pairs, p, lane))
        for f in range(fours):
            whole[f] = splat(item(targets.wholes, f, lane))

        nodes, node_keys = int_tile(rounds), int_tile(rounds)
        for m in range(rounds):
            node_keys[m] = splat(_FARTHEST)
        for k in range(vectors):
            distance = box_distances(node_boxes, box_size * (tree * vectors + k), roots, whole)
            _insert(node_keys, rounds, (distance & ~node_ids) | (lane_numbers() + LANES * k))
        for m in range(rounds):
            keys = node_keys[m]
            if kept_nodes < LANES:
                keys = minimum(keys, halves_swapped(keys))
            nodes[m] = (keys & node_ids) + n_nodes * tree

        leaves = int_tile(kept_leaves)
        for m in range(kept_leaves):
            leaves[m] = splat(_FARTHEST)
        for k in range(kept_nodes):
            distance = box_distances(leaf_boxes, box_size * item(nodes, 0, k), roots, whole)
            _insert(leaves, kept_leaves, (distance & ~leaf_ids) | k)
        for m in range(kept_leaves):
            leaves[m] = leaves[m] & leaf_ids

        best = splat(_FARTHEST)
        for k in range(LANES * kept_leaves):
            leaf = LANES * item(nodes, 0, item(leaves, 0, k)) + k % LANES
            distance = point_distances(points, leaf_size * leaf, roots, target)
            best = minimum(best, (distance & ~slot_ids) | k)
        key = least(best)
        k = key & slot_ids
        leaf = LANES * item(nodes, 0, item(leaves, 0, k)) + k % LANES
        return key & ~slot_ids, LANES * leaf + lowest_bit(mask_word(best == key))

    return nearest
