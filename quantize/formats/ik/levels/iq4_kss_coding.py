"""Sub-blocks of IQ4_KSS: codes of 4 bits in fours, the ones in whose bits are even in number.

Such a four is a word of 16 bits, of which one is free. So each weight has a nearest level among the codes
with an even number of ones and another among the rest, and of the nearer ones of a four, one is exchanged for
the other where their ones are odd in number: the one for which that costs least.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from quantize.formats.base import Floats32
from quantize.formats.ik.levels.cells import Cells, cut_into, nearest_of
from quantize.formats.ik.levels.levels import LEVELS_4
from quantize.formats.ik.levels.scale_search import Coding
from quantize.simd.constants import INFINITY, ZERO
from quantize.simd.kernel import inlinable
from quantize.simd.lane_memory import FloatTile, IntTile, int_tile
from quantize.simd.lanes import Floats, absolute, minimum, select, splat, to_int
from quantize.simd.wide_tables import look_up_in

SHIFT = 4
"""Distance of the second set of levels from the first."""

SIZE = 32

_LEVELS = LEVELS_4[:16]
_CELLS = 32


class _Part(NamedTuple):
    """The codes that have an even number of ones, or an odd number, and the cells of their levels."""

    codes: Floats32
    cells: Cells


def _part(parity: int) -> _Part:
    chosen = [code for code in range(16) if code.bit_count() % 2 == parity]
    cells = cut_into(_CELLS, _LEVELS[chosen], _LEVELS)
    if cells is None:
        raise ValueError(f"{_CELLS} cells are too few for {len(chosen)} of sixteen levels")
    return _Part(np.array(chosen + chosen, np.float32), cells)


_EVEN, _ODD = _part(0), _part(1)
_EVEN_CODES, _ODD_CODES = _EVEN.codes, _ODD.codes
_even_square, _even_level, _even_code = nearest_of(_EVEN.cells)
_odd_square, _odd_level, _odd_code = nearest_of(_ODD.cells)

_DENSITY = np.float32(_EVEN.cells.density)
_UNIT = np.float32(1 / _EVEN.cells.density)
_ORIGIN = np.float32(-_EVEN.cells.start * _EVEN.cells.density)
_STEP = np.float32(SHIFT * _EVEN.cells.density)


@inlinable
def place_in_four(four: int, i: int) -> int:
    """Return which weight of a sub-block is number i of a four, from the lowest bits of its word on."""
    return 2 * four + (i >> 1) + 16 * (i & 1)


@inlinable
def _error_of(x: FloatTile, importances: Floats32, column: int, scale: Floats, second: np.float32) -> Floats:
    inverse = _DENSITY / scale
    start = splat(_ORIGIN - second * _STEP)
    total = splat(ZERO)
    for four in range(SIZE // 4):
        is_odd = total != total
        least = splat(INFINITY)
        for i in range(4):
            place = place_in_four(four, i)
            number = x[place] * inverse + start
            cost = importances[column + place]
            even, odd = cost * _even_square(number), cost * _odd_square(number)
            total += minimum(even, odd)
            least = minimum(least, absolute(even - odd))
            is_odd ^= odd < even
        total += select(is_odd, least, ZERO)
    cell = scale * _UNIT
    return total * (cell * cell)


@inlinable
def _choose(
    x: FloatTile, importances: Floats32, column: int, inverse: Floats, start: Floats, are_odd: IntTile
) -> None:
    """Fill `are_odd`, Ints (32), with 1 for the weights whose codes have an odd number of ones."""
    for four in range(SIZE // 4):
        is_odd = inverse != inverse
        least = splat(INFINITY)
        exchanged = splat(0)
        for i in range(4):
            place = place_in_four(four, i)
            number = x[place] * inverse + start
            cost = importances[column + place]
            even, odd = cost * _even_square(number), cost * _odd_square(number)
            difference = absolute(even - odd)
            exchanged = select(difference < least, splat(i), exchanged)
            least = minimum(least, difference)
            are_odd[place] = select(odd < even, splat(1), 0)
            is_odd ^= odd < even
        for i in range(4):
            place = place_in_four(four, i)
            are_odd[place] = select(is_odd & (exchanged == i), are_odd[place] ^ 1, are_odd[place])


@inlinable
def _sums_of(
    x: FloatTile, importances: Floats32, column: int, scale: Floats, second: Floats
) -> tuple[Floats, Floats]:
    inverse = _DENSITY / scale
    start = _ORIGIN - second * _STEP
    are_odd = int_tile(32)
    _choose(x, importances, column, inverse, start, are_odd)
    sum_lx = splat(ZERO)
    sum_l2 = splat(ZERO)
    for i in range(SIZE):
        number = x[i] * inverse + start
        nearest = select(are_odd[i] != 0, _odd_level(number), _even_level(number))
        level = (nearest - start) * _UNIT
        weighted = importances[column + i] * level
        sum_lx += weighted * x[i]
        sum_l2 += weighted * level
    return sum_lx, sum_l2


@inlinable
def _codes_of(
    x: FloatTile, importances: Floats32, column: int, scale: Floats, second: Floats, codes: IntTile
) -> None:
    inverse = _DENSITY / scale
    start = _ORIGIN - second * _STEP
    are_odd = int_tile(32)
    _choose(x, importances, column, inverse, start, are_odd)
    for i in range(SIZE):
        number = x[i] * inverse + start
        even = look_up_in(_EVEN_CODES, 16, _even_code(number))
        odd = look_up_in(_ODD_CODES, 16, _odd_code(number))
        codes[i] = to_int(select(are_odd[i] != 0, odd, even))


EVEN_CODING = Coding(_error_of, _sums_of, _codes_of)
