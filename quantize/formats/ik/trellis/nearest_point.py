"""The search of the point nearest to a group of weights, in a tree of `point_trees`.

It looks at the boxes of all nodes, then at those of the leaves of the nearest nodes, then at the points of
the nearest leaves. How many are kept is fixed, and leaves are kept lane by lane, so nothing branches. An
exact search looks at fewer boxes and takes three times as long, because the processor can't predict it.
What is found is mostly the nearest point, and else one that is little farther; docs/kernels.md says how much.

Distances are sums of squares of 16-bit integers, the coordinates times the roots of their weights. Those of
boxes are coarse, as their coordinates are halved.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from quantize.simd.kernel import inlined
from quantize.simd.lane_items import halves_swapped, item, least, lowest_bit, mask_word
from quantize.simd.lane_memory import int_tile, load
from quantize.simd.lanes import LANES, lane_numbers, maximum, minimum, splat
from quantize.simd.pairs import byte_excess, pair_difference, pair_norm, pair_product

_FARTHEST = 2**31 - 1
_UPPER_BYTES = 0xFF00FF00


def search_of(dim: int, n_nodes: int, kept_nodes: int, kept_leaves: int) -> Callable[..., Any]:
    """Return the search for points of `dim` dimensions in trees of `n_nodes` nodes.

    kept_nodes   how many nodes are searched: LANES / 2, LANES or a multiple
    kept_leaves  how many leaves of each lane are searched, at most 4
    """
    fours = dim // 4
    pairs = dim // 2
    vectors = n_nodes // LANES
    leaf_size = LANES * fours
    box_size = 2 * LANES * fours
    node_ids = n_nodes - 1
    rounds = max(kept_nodes // LANES, 1)
    leaf_ids = kept_nodes - 1
    slot_ids = 4 * LANES - 1

    @inlined
    def insert(kept: Any, count: int, key: Any) -> None:
        """Put a key among the `count` least of each lane, in ascending order."""
        for m in range(count):
            lower = minimum(kept[m], key)
            key = maximum(kept[m], key)
            kept[m] = lower

    @inlined
    def box_distances(boxes: Any, at: int, roots: Any, whole: Any) -> Any:
        """Return the squared distances of the LANES boxes from boxes[at] on, a quarter of what they are."""
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
    def point_distances(points: Any, at: int, roots: Any, target: Any) -> Any:
        """Return the squared distances of the LANES points from points[at] on."""
        total = splat(0)
        for f in range(fours):
            levels = load(points, at + LANES * f)
            even = pair_product((levels << 8) & _UPPER_BYTES, roots[2 * f])
            odd = pair_product(levels & _UPPER_BYTES, roots[2 * f + 1])
            total = total + pair_norm(pair_difference(even, target[2 * f]))
            total = total + pair_norm(pair_difference(odd, target[2 * f + 1]))
        return total

    @inlined
    def nearest(
        points: Any, leaf_boxes: Any, node_boxes: Any, tree: int,
        all_roots: Any, group: int, wholes: Any, targets: Any, lane: int,
    ) -> Any:  # fmt: skip
        """Return the squared distance of a near point, and its place in the trees.

        tree       number of the tree
        all_roots  int32, `pairs` for each group: roots of weights times 256, below 2**15
        group      number of the group
        wholes     Ints: fours of bytes, the weights in levels plus 128, halved, in lane `lane`
        targets    Ints: pairs, the weights in levels times the roots of their weights, in lane `lane`
        """
        roots, target, whole = int_tile(pairs), int_tile(pairs), int_tile(fours)
        for p in range(pairs):
            roots[p] = splat(all_roots[pairs * group + p])
            target[p] = splat(item(targets, p, lane))
        for f in range(fours):
            whole[f] = splat(item(wholes, f, lane))

        nodes, node_keys = int_tile(rounds), int_tile(rounds)
        for m in range(rounds):
            node_keys[m] = splat(_FARTHEST)
        for k in range(vectors):
            distance = box_distances(node_boxes, box_size * (tree * vectors + k), roots, whole)
            insert(node_keys, rounds, (distance & ~node_ids) | (lane_numbers() + LANES * k))
        for m in range(rounds):
            keys = node_keys[m]
            if kept_nodes < LANES:
                keys = minimum(keys, halves_swapped(keys))
            nodes[m] = (keys & node_ids) + n_nodes * tree

        leaves, leaf_keys = int_tile(kept_leaves), int_tile(kept_leaves)
        for m in range(kept_leaves):
            leaf_keys[m] = splat(_FARTHEST)
        for k in range(kept_nodes):
            distance = box_distances(leaf_boxes, box_size * item(nodes, 0, k), roots, whole)
            insert(leaf_keys, kept_leaves, (distance & ~leaf_ids) | k)

        for m in range(kept_leaves):
            leaves[m] = leaf_keys[m] & leaf_ids
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
