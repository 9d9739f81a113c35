"""Sub-blocks of IQ2_KL: weights in pairs, each pair the nearest of 32 pairs of levels."""

from __future__ import annotations

import numpy as np

from quantize.formats.base import Floats32
from quantize.formats.ik.levels.levels import LEVEL_PAIRS, LEVELS_3
from quantize.formats.ik.levels.scale_search import Coding
from quantize.simd.constants import INFINITY, ONE, ZERO
from quantize.simd.kernel import inlinable
from quantize.simd.lane_memory import FloatTile, IntTile, float_tile, int_tile
from quantize.simd.lanes import Floats, minimum, select, splat
from quantize.simd.wide_tables import look_up_in

SIZE = 32

_LEVELS = LEVELS_3[:8]
_FIRSTS = np.searchsorted(_LEVELS, LEVEL_PAIRS[::2]).astype(np.int32)
_SECONDS = np.searchsorted(_LEVELS, LEVEL_PAIRS[1::2]).astype(np.int32)
_FIRST_LEVELS = np.ascontiguousarray(LEVEL_PAIRS[::2])
_SECOND_LEVELS = np.ascontiguousarray(LEVEL_PAIRS[1::2])


@inlinable
def _errors_of(number: Floats, cost: np.float32, errors: FloatTile) -> None:
    """Fill `errors`, Floats (8), with what each level costs."""
    for k in range(8):
        distance = number - _LEVELS[k]
        errors[k] = cost * (distance * distance)


@inlinable
def _error_of(x: FloatTile, importances: Floats32, column: int, scale: Floats, _second: np.float32) -> Floats:
    inverse = ONE / scale
    firsts, seconds = float_tile(8), float_tile(8)
    total = splat(ZERO)
    for i in range(0, SIZE, 2):
        _errors_of(x[i] * inverse, importances[column + i], firsts)
        _errors_of(x[i + 1] * inverse, importances[column + i + 1], seconds)
        least = splat(INFINITY)
        for code in range(32):
            least = minimum(firsts[_FIRSTS[code]] + seconds[_SECONDS[code]], least)
        total += least
    return total * (scale * scale)


@inlinable
def _choose(x: FloatTile, importances: Floats32, column: int, scale: Floats, codes: IntTile) -> None:
    """Fill `codes`, Ints (16)."""
    inverse = ONE / scale
    firsts, seconds = float_tile(8), float_tile(8)
    for i in range(0, SIZE, 2):
        _errors_of(x[i] * inverse, importances[column + i], firsts)
        _errors_of(x[i + 1] * inverse, importances[column + i + 1], seconds)
        least = splat(INFINITY)
        chosen = splat(0)
        for code in range(32):
            error = firsts[_FIRSTS[code]] + seconds[_SECONDS[code]]
            better = error < least
            least = select(better, error, least)
            chosen = select(better, splat(code), chosen)
        codes[i >> 1] = chosen


@inlinable
def _sums_of(
    x: FloatTile, importances: Floats32, column: int, scale: Floats, _second: Floats
) -> tuple[Floats, Floats]:
    codes = int_tile(16)
    _choose(x, importances, column, scale, codes)
    sum_lx = splat(ZERO)
    sum_l2 = splat(ZERO)
    for i in range(SIZE):
        levels = _SECOND_LEVELS if i & 1 else _FIRST_LEVELS
        level = look_up_in(levels, 32, codes[i >> 1])
        weighted = importances[column + i] * level
        sum_lx += weighted * x[i]
        sum_l2 += weighted * level
    return sum_lx, sum_l2


@inlinable
def _codes_of(
    x: FloatTile, importances: Floats32, column: int, scale: Floats, _second: Floats, codes: IntTile
) -> None:
    """Fill the first 16 of the sub-block's codes."""
    _choose(x, importances, column, scale, codes)


PAIR_CODING = Coding(_error_of, _sums_of, _codes_of)
