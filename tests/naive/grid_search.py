"""Twin of the searches off a grid: every neighbour of a point and its error, in the reference's order."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from quantize.formats.iq.grids import NOWHERE, Grid

Floats = npt.NDArray[np.float32]


def neighbours(grid: Grid, number: int) -> npt.NDArray[np.int64]:
    """Return the indices of the grid points in the nearest shells around a lattice point, nearest first."""
    levels = grid.levels_of(np.array([number]))
    distances = ((grid.levels.astype(int) - levels) ** 2).sum(axis=1)
    order = np.lexsort((np.arange(len(distances)), distances))
    return order[distances[order] <= np.unique(distances)[grid.shells - 1]]


def nearest(grid: Grid, number: int, x: Floats, weights: Floats, scale: np.float32, values: Floats) -> int:
    """Return the code of a lattice point if it is on the grid, else of its best neighbour.

    Best is the least sum of weight * (scale * value - x)**2, the first of equals; NOWHERE if none is below
    the largest float32. ggml's iq2_find_best_neighbour, iq3_find_best_neighbour, iq1_find_best_neighbour2.

    x, weights  (size,)
    values      what each level stands for, (base,)
    """
    if number in grid.numbers:
        return int(grid.codes[np.searchsorted(grid.numbers, number)])
    near = neighbours(grid, number)
    errors = np.zeros(len(near), np.float32)
    with np.errstate(all="ignore"):
        for i in range(grid.size):
            difference = scale * values[grid.levels[near, i]] - x[i]
            errors += difference * weights[i] * difference
    assert errors.dtype == np.float32
    finite = errors < np.finfo(np.float32).max
    return int(grid.codes[near[np.argmin(np.where(finite, errors, np.inf))]]) if finite.any() else NOWHERE
