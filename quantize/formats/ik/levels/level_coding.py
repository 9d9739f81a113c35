"""Sub-blocks whose weights each take the nearest of a set of levels."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from quantize.formats.ik.levels.cells import Cells, Nearest
from quantize.formats.ik.levels.scale_search import Coding
from quantize.simd.constants import ZERO
from quantize.simd.kernel import inlinable
from quantize.simd.lane_memory import FloatTile, IntTile
from quantize.simd.lanes import Floats, splat


def level_coding(cells: Cells, nearest: Nearest, shift: float, size: int) -> Coding:
    """Return how sub-blocks of `size` weights are coded on one of two sets of levels.

    cells, nearest  of the first set
    shift           what the levels of the second set are higher by
    """
    square, level_of, code_of = nearest
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
