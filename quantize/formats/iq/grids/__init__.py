"""The grids of IQ1, IQ2 and IQ3: the few vectors of small levels that a group of weights may be coded as.

A group is 8 elements of 3 levels each (IQ1, IQ2) or 4 of 8 levels (IQ3). The lattice of all level vectors
has 3**8 or 8**4 points; a grid has 256 to 2048 of them. A point has three names:

    number   its levels as digits, lowest first: base 3 or base 8
    code     its levels as bits, lowest first: 2 or 3 bits each
    index    its place among the points of the grid, in ascending order; what a block stores

Levels mean different things to different formats: see `values` for what decoding makes of them.

`tables` says which grid points are near each point of the lattice, for the search off the grid. They are
computed when a kernel first needs them, in a tenth of a second or two. The neighbours of a point are the
grid points at its smallest distance, at its second smallest, and so on for as many shells as the grid asks.
Distance is the squared distance of the level vectors. Nearer ones come first, of equals the smaller index:
the first of several equally good neighbours is the one that a search takes. This is what ggml's
iq2xs_init_impl and iq3xs_init_impl compute.
"""

from __future__ import annotations

import base64
from dataclasses import dataclass
from functools import cache, cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from quantize.formats.iq.grids import bitmaps
from quantize.simd.lanes import LANES


@dataclass(frozen=True, eq=False)
class Grid:
    """A grid.

    bitmap   which lattice points are on it; see the module `bitmaps`
    size     elements of a group
    values   what each level decodes to, before the scale
    shells   how many of the nearest distances a search off the grid looks at
    """

    bitmap: str
    size: int
    values: tuple[int, ...]
    shells: int

    @property
    def base(self) -> int:
        """Levels of an element."""
        return len(self.values)

    @property
    def code_bits(self) -> int:
        """Bits of an element in a code."""
        return (self.base - 1).bit_length()

    @cached_property
    def numbers(self) -> npt.NDArray[np.int64]:
        """The numbers of the grid's points, ascending: index -> number."""
        packed = np.frombuffer(base64.b64decode(self.bitmap), np.uint8)
        return np.flatnonzero(np.unpackbits(packed, bitorder="little"))

    @cached_property
    def levels(self) -> npt.NDArray[np.uint8]:
        """Index -> the levels of its point, uint8 (n_points, size)."""
        return self.levels_of(self.numbers)

    @cached_property
    def codes(self) -> npt.NDArray[np.int32]:
        """Index -> the code of its point, int32 (n_points,), ascending."""
        return self.codes_of(self.levels)

    @cached_property
    def points(self) -> npt.NDArray[np.int8]:
        """Index -> what its point decodes to, int8 (n_points, size)."""
        return np.array(self.values, np.int8)[self.levels]

    def levels_of(self, numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.uint8]:
        """Return the digits of numbers (n,), uint8 (n, size)."""
        return (numbers[:, None] // self.base ** np.arange(self.size) % self.base).astype(np.uint8)

    def codes_of(self, levels: npt.NDArray[np.uint8]) -> npt.NDArray[np.int32]:
        """Return the codes of levels (n, size), int32 (n,)."""
        shifts = self.code_bits * np.arange(self.size)
        return (levels.astype(np.int32) << shifts).sum(axis=1).astype(np.int32)


_MAGNITUDES = (8, 25, 43)

IQ2_XXS = Grid(bitmaps.IQ2_XXS, size=8, values=_MAGNITUDES, shells=2)
IQ2_XS = Grid(bitmaps.IQ2_XS, size=8, values=_MAGNITUDES, shells=2)
IQ2_S = Grid(bitmaps.IQ2_S, size=8, values=_MAGNITUDES, shells=1)
IQ1 = Grid(bitmaps.IQ1, size=8, values=(-1, 0, 1), shells=3)
IQ3_XXS = Grid(bitmaps.IQ3_XXS, size=4, values=(4, 12, 20, 28, 36, 44, 52, 62), shells=2)
IQ3_S = Grid(bitmaps.IQ3_S, size=4, values=(1, 3, 5, 7, 9, 11, 13, 15), shells=3)


COUNT_BITS = 8
"""Lists are found by `~(start << COUNT_BITS | count)`, in units of LANES codes."""

NOWHERE = -1
"""The code where no neighbour is at a distance that float32 can hold. ggml aborts in this case."""


class GridTables(NamedTuple):
    """Tables in which kernels look up points.

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
