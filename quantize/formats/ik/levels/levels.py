"""The levels that ik_llama.cpp's non-linear types choose from, and the nearest of them.

A sub-block of such a type picks one of two sets of levels, the second a little above the first. Here a table
is both sets, one after the other, so that a code of set s of n levels stands for TABLE[n * s + code].

Each weight takes the nearest of 4 to 64 levels: its cell says which two it lies between. The range of the
levels is cut into cells of one width, so narrow that none holds two of the edges at which the nearest level
changes. Numbers are measured in cells: number t, rounded down, is the number of its cell, and the tables of
that cell hold the two levels that can be nearest, in cells as well.

Sources: the tables iq2nl_values, iq2kl_values, iq3nl_values, iq4k_values and iq5nl_values of ggml-common.h,
as of ik_llama.cpp 8337e4c (2026-08-15).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from quantize.formats.ik.levels.scale_search import Coding
from quantize.simd.floats import ZERO
from quantize.simd.kernel import inlinable
from quantize.simd.lane_items import look_up_in
from quantize.simd.lane_memory import FloatTile, IntTile
from quantize.simd.lanes import Floats, Ints, maximum, minimum, select, splat, to_int

Levels = npt.NDArray[np.float32]

LEVELS_2: Levels = np.array([-31, -13, 1, 17, -26, -8, 6, 22], np.float32)
"""IQ2_K's and IQ2_KS's: twice four levels."""

LEVELS_3: Levels = np.array([-63, -40, -23, -10, 1, 13, 28, 47, -59, -36, -19, -6, 5, 17, 32, 51], np.float32)
"""IQ3_K's and IQ3_KS's: twice eight levels."""

LEVELS_4: Levels = np.array(
    [
        [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113],
        [-123, -100, -79, -61, -45, -31, -18, -6, 5, 17, 29, 42, 57, 73, 93, 117],
    ],
    np.float32,
).reshape(-1)
"""IQ4_K's, IQ4_KS's and IQ4_KSS's: twice sixteen levels. The first set is IQ4_NL's."""

LEVELS_5: Levels = np.array(
    [
        [-126, -114, -103, -92, -83, -74, -65, -57, -50, -43, -36, -30, -24, -18, -12, -6],
        [-1, 5, 11, 17, 23, 29, 36, 43, 51, 59, 68, 77, 87, 97, 109, 121],
        [-124, -112, -101, -90, -81, -72, -63, -55, -48, -41, -34, -28, -22, -16, -10, -4],
        [1, 7, 13, 19, 25, 31, 38, 45, 53, 61, 70, 79, 89, 99, 111, 123],
    ],
    np.float32,
).reshape(-1)
"""IQ5_K's and IQ5_KS's: twice thirty-two levels."""


def _levels_6() -> Levels:
    """Return LEVELS_6. Compilers contract each step of the polynomial to one that rounds once.

    So does float64 here: it holds the products exactly, and no sum is where rounding it twice would show.
    """
    codes, levels = np.arange(64), np.zeros(64, np.float32)
    for coefficient in np.array([0.0011972, -0.11218, 6.2568, -127.0], np.float32):
        levels = (levels.astype(np.float64) * codes + float(coefficient)).astype(np.float32)
    return np.concatenate([levels, levels + np.float32(1)])


LEVELS_6: Levels = _levels_6()
"""IQ6_K's: twice sixty-four levels, of code q

    -127 + q * (6.2568 + q * (-0.11218 + q * 0.0011972))

and 1 more in the second set."""

_PAIRS = (
    "e9c1 0dc1 c1d8 f6d8 0dd8 2fd8 d8e9 e9e9 01e9 0de9 1ce9 c1f6 01f6 0df6 2ff6 e901"
    " f601 0101 0d01 1c01 d80d e90d f60d 010d 0d0d c11c e91c 011c 1c1c 2f1c e92f 0d2f"
)

LEVEL_PAIRS: Levels = (
    np.array([int(pair, 16) for pair in _PAIRS.split()], "<u2").view(np.int8).astype(np.float32)
)
"""IQ2_KL's: thirty-two pairs of levels; code q stands for LEVEL_PAIRS[2 * q] and LEVEL_PAIRS[2 * q + 1]."""


Table = npt.NDArray[np.float32]


class Cells(NamedTuple):
    """Levels in cells. Level v is number (v - start) * density.

    lower, upper  the two levels that can be nearest to a number in each cell, float32 (a power of two,);
                  equal where the cell has no edge
    codes         the code of the lower one, float32; that of the upper one, where it is another, is 1 more
    """

    start: float
    density: float
    lower: Table
    upper: Table
    codes: Table


def cut(levels: Table) -> Cells:
    """Return the fewest cells that do for ascending levels."""
    for count in (16, 32, 64, 128):
        cells = cut_into(count, levels, levels)
        if cells is not None:
            return cells
    raise ValueError(f"levels lie too close together: {levels}")


def cut_into(count: int, levels: Table, span: Table) -> Cells | None:
    """Return so many cells for ascending levels, from the first to the last of `span`, or None if too few."""
    exact = levels.astype(np.float64)
    start = float(span[0])
    density = count / (float(span[-1]) - start)
    places = ((exact[:-1] + exact[1:]) / 2 - start) * density
    # an edge counts for both cells that it lies between, as rounding can bring a number into either
    first, last = np.floor(places - _NEAR), np.floor(places + _NEAR)
    cells = np.arange(count)
    inside = (first[:, None] <= cells) & (cells <= last[:, None])
    if (inside.sum(axis=0) > 1).any():
        return None
    below = (places[:, None] < cells + 0.5).sum(axis=0)
    below = np.where(inside.any(axis=0), inside.argmax(axis=0), below)
    above = np.where(inside.any(axis=0), below + 1, below)
    numbers = ((exact - start) * density).astype(np.float32)
    return Cells(start, density, numbers[below], numbers[above], below.astype(np.float32))


_NEAR = 1e-4
"""Distance from the end of a cell, in cells, that float32 does not tell from 0."""


class Nearest(NamedTuple):
    """Functions of kernels for one table of levels, made by `nearest_of`. All take a number in cells.

    square  the square of the distance to the nearest level, in cells
    level   the nearest level, in cells
    code    the code of the nearest level
    """

    square: Any
    level: Any
    code: Any


def nearest_of(cells: Cells) -> Nearest:
    """Return the functions that look levels up."""
    lower, upper, codes = cells.lower, cells.upper, cells.codes
    size = len(lower)
    last = np.float32(size - 1)

    @inlinable
    def cell_of(number: Floats) -> Ints:
        return to_int(maximum(minimum(number, last), ZERO))

    @inlinable
    def square(number: Floats) -> Floats:
        cell = cell_of(number)
        below = number - look_up_in(lower, size, cell)
        above = number - look_up_in(upper, size, cell)
        return minimum(below * below, above * above)

    @inlinable
    def level(number: Floats) -> Floats:
        cell = cell_of(number)
        below, above = look_up_in(lower, size, cell), look_up_in(upper, size, cell)
        return select(number - below < above - number, below, above)

    @inlinable
    def code(number: Floats) -> Ints:
        cell = cell_of(number)
        below, above = look_up_in(lower, size, cell), look_up_in(upper, size, cell)
        first = to_int(look_up_in(codes, size, cell))
        return select((number - below >= above - number) & (below != above), first + 1, first)

    return Nearest(square, level, code)


def nearest_of_four(cells: Cells) -> Nearest:
    """Return functions that compare with three edges, which is faster than look-ups for four levels."""
    levels = np.unique(np.concatenate([cells.lower, cells.upper]))
    zeroth, first, second, third = (np.float32(level) for level in levels)
    edges = (levels[:-1] + levels[1:]) / np.float32(2)
    lowest, middle, highest = (np.float32(edge) for edge in edges)

    @inlinable
    def level(number: Floats) -> Floats:
        low = select(number < lowest, splat(zeroth), first)
        high = select(number < highest, splat(second), third)
        return select(number < middle, low, high)

    @inlinable
    def square(number: Floats) -> Floats:
        distance = number - level(number)
        return distance * distance

    @inlinable
    def code(number: Floats) -> Ints:
        low = select(number < lowest, splat(0), 1)
        high = select(number < highest, splat(2), 3)
        return select(number < middle, low, high)

    return Nearest(square, level, code)


def level_coding(levels: Table, size: int) -> Coding:
    """Return how sub-blocks of `size` weights are coded on one of two sets of levels.

    levels  both sets, the second higher than the first by the same everywhere
    """
    n_levels = len(levels) // 2
    cells, shift = cut(levels[:n_levels]), float(levels[n_levels] - levels[0])
    square, level_of, code_of = nearest_of_four(cells) if n_levels == 4 else nearest_of(cells)
    density = np.float32(cells.density)
    unit = np.float32(1 / cells.density)
    origin = np.float32(-cells.start * cells.density)
    step = np.float32(shift * cells.density)

    @inlinable
    def error_of(
        x: FloatTile, importances: npt.NDArray[np.float32], column: int, scale: Floats, second: np.float32
    ) -> Floats:
        inverse = density / scale
        start = splat(origin - second * step)
        total = splat(ZERO)
        for i in range(size):
            total += importances[column + i] * square(x[i] * inverse + start)
        cell = scale * unit
        return total * (cell * cell)

    @inlinable
    def sums_of(
        x: FloatTile, importances: npt.NDArray[np.float32], column: int, scale: Floats, second: Floats
    ) -> tuple[Floats, Floats]:
        inverse = density / scale
        start = origin - second * step
        sum_lx = splat(ZERO)
        sum_l2 = splat(ZERO)
        for i in range(size):
            level = (level_of(x[i] * inverse + start) - start) * unit
            weighted = importances[column + i] * level
            sum_lx += weighted * x[i]
            sum_l2 += weighted * level
        return sum_lx, sum_l2

    @inlinable
    def codes_of(
        x: FloatTile,
        importances: npt.NDArray[np.float32],
        column: int,
        scale: Floats,
        second: Floats,
        codes: IntTile,
    ) -> None:
        inverse = density / scale
        start = origin - second * step
        for i in range(size):
            codes[i] = code_of(x[i] * inverse + start)

    return Coding(error_of, sums_of, codes_of)
