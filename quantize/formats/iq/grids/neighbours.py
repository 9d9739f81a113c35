"""Tables for the search off the grid: which grid points are near each point of the lattice.

Computed when a kernel first needs them, in a tenth of a second or two. The neighbours of a point are the
grid points at its smallest distance, at its second smallest, and so on for as many shells as the grid asks.
Distance is the squared distance of the level vectors. Nearer ones come first, of equals the smaller index:
the first of several equally good neighbours is the one that a search takes. This is what ggml's
iq2xs_init_impl and iq3xs_init_impl compute.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from quantize.formats.iq.grids import Grid
from quantize.simd.lanes import LANES

COUNT_BITS = 8
"""Lists are found by `~(start << COUNT_BITS | count)`, in units of LANES codes."""

NOWHERE = -1
"""The code where no neighbour is at a distance that float32 can hold. ggml aborts in this case."""


class GridTables(NamedTuple):
    """What kernels look up.

    entries   int32 (n_lattice,), by number: the point's code if it is on the grid, else a negative number
              that tells where its list is
    lists     uint16, lists of codes of neighbours, each filled up to a multiple of LANES with its last one
    indices   int32 (2**(code_bits * size),), by code: the point's index, or -1 off the grid
    """

    entries: npt.NDArray[np.int32]
    lists: npt.NDArray[np.uint16]
    indices: npt.NDArray[np.int32]


@cache
def tables(grid: Grid, width: int = LANES) -> GridTables:
    """Return the tables of a grid; `width` codes are a unit of its lists."""
    lattice = grid.levels_of(np.arange(grid.base**grid.size))
    codes = grid.codes_of(lattice)
    off_grid = np.ones(len(lattice), bool)
    off_grid[grid.numbers] = False
    owners, neighbours = _neighbours(grid, lattice[off_grid])

    counts = np.bincount(owners, minlength=int(off_grid.sum()))
    chunks = -(-counts // width)
    starts = np.cumsum(chunks) - chunks
    lists = np.repeat(grid.codes[neighbours[np.cumsum(counts) - 1]], chunks * width).astype(np.uint16)
    places = np.arange(len(owners)) - np.repeat(np.cumsum(counts) - counts, counts)
    lists[starts[owners] * width + places] = grid.codes[neighbours]

    entries = codes.copy()
    entries[off_grid] = ~(starts << COUNT_BITS | chunks)
    indices = np.full(1 << grid.code_bits * grid.size, -1, np.int32)
    indices[grid.codes] = np.arange(len(grid.codes))
    return GridTables(entries, lists, indices)


def _neighbours(
    grid: Grid, points: npt.NDArray[np.uint8]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return which point has which neighbour, ordered by point, then as a search meets its neighbours.

    points   levels, uint8 (n_points, size)
    returns  numbers of points and indices of grid points, int64 (n_pairs,) each
    """
    ours, theirs = points.astype(np.float32), grid.levels.astype(np.float32)
    squares = (ours**2).sum(axis=1)[:, None] + (theirs**2).sum(axis=1)
    distances = (squares - 2 * ours @ theirs.T).astype(np.uint8)  # small integers: float32 is exact
    limit = distances.min(axis=1, keepdims=True)
    for _ in range(grid.shells - 1):
        beyond = np.where(distances > limit, distances, np.uint8(255)).min(axis=1, keepdims=True)
        limit = np.where(beyond < 255, beyond, limit)
    owners, neighbours = np.nonzero(distances <= limit)
    order = np.lexsort((neighbours, distances[owners, neighbours], owners))
    return owners[order], neighbours[order]
