"""The levels of a trellis type as points in space, in a tree of boxes, for the search of the nearest one.

An index of such a type (KT) stands for the levels of a group of 4 or 8 weights. Groups don't depend on each
other. So the best index is that of the nearest of 2**13 .. 2**16 points, in a space of 4 or 8 dimensions that
have weights.

LANES points that lie close together are a leaf, and LANES leaves a node. The points are halved along the
dimension in which they spread most, and the halves again, until LANES are left. The tree has the box around
the points of each leaf and each node.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from quantize.formats.ik.trellis.trellis import START, walks
from quantize.simd.lanes import LANES

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
