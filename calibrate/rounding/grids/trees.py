"""Grids as trees: points that begin with the same levels share the nodes of that beginning.

A search that rounds one element after the other, each under the errors of those before it, computes only once
what a beginning costs.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from quantize.formats.iq.grids import Grid


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
    """Return the tree of a grid: a node at depth k stands for the first k levels of some of its points."""
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
