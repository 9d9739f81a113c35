"""IQ4_KSS: 256 weights in 128 bytes, 4 bits each, on sixteen levels out of two sets, a scale for the row.

A row starts with d, float32. Then come its blocks, eight sub-blocks of eight 16-bit words each. Bit 0 of word
k is bit k of s, the scale of the sub-block. Its other 15 bits, shifted right by one and combined with
themselves by exclusive or, are codes q of 4 bits: byte i of the sixteen holds q[i] in its lower half,
q[i + 16] in the upper. So the bits between two neighbours decide, and one bit of each word is free for s.

The value of weight i = 0 .. 31 in a sub-block, whose levels are the second set of LEVELS_4 if bit 0 of s is
set:

    d * ((s & 254) - 127) * level[q[i]]

Source: block_iq4_kss and dequantize_row_iq4_kss of ik_llama.cpp 8337e4c.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from gguf_tools.format.ggml_types import IQ4_KSS
from quantize.formats.base import Bytes, Floats32
from quantize.formats.ik.levels.levels import LEVELS_4, Cells, cut_into, nearest_of
from quantize.formats.ik.levels.scale_search import Coding, Integers, ScaleTrials, row_quantizer
from quantize.formats.ik.rows import ik_format
from quantize.simd.floats import INFINITY, ZERO
from quantize.simd.kernel import inlinable, kernel
from quantize.simd.lane_items import look_up_in
from quantize.simd.lane_memory import FloatTile, IntTile, int_tile, tail
from quantize.simd.lanes import Floats, Ints, absolute, minimum, select, splat, to_int

_BYTES = 16  # of a sub-block


@kernel
def _decode(data: Bytes, scales: Floats32, out: Floats32) -> None:
    for row in range(len(out)):
        for j in range(out.shape[1] // 32):
            words = data[row, j * _BYTES : (j + 1) * _BYTES]
            code = 0
            for k in range(8):
                code |= (words[2 * k] & 1) << k
            first = 16 * (code & 1)
            scale = scales[row] * np.float32((code & 254) - 127)
            weights = out[row, 32 * j :]
            for k in range(8):
                word = words[2 * k] & 254 | words[2 * k + 1] << 8
                word ^= word >> 1
                for i in range(2):
                    packed = word >> 8 * i
                    weights[2 * k + i] = scale * LEVELS_4[first + (packed & 0xF)]
                    weights[2 * k + i + 16] = scale * LEVELS_4[first + (packed >> 4 & 0xF)]


# ---- how sub-blocks are coded
#
# A four is a word of 16 bits, of which one is free, so the bits of its codes that are ones must be even in
# number. Each weight has a nearest level among the codes with an even number of ones and another among the
# rest. Where the ones of a four's nearest codes are odd in number, one code is exchanged for the other: the
# one for which that costs least.

SHIFT = 4
"""Distance of the second set of levels from the first."""

_SIZE = 32

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
    for four in range(_SIZE // 4):
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
    for four in range(_SIZE // 4):
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
    for i in range(_SIZE):
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
    for i in range(_SIZE):
        number = x[i] * inverse + start
        even = look_up_in(_EVEN_CODES, 16, _even_code(number))
        odd = look_up_in(_ODD_CODES, 16, _odd_code(number))
        codes[i] = to_int(select(are_odd[i] != 0, odd, even))


_CODING = Coding(_error_of, _sums_of, _codes_of)


# ---- rows

_IQ4_KSS_SEARCH = ScaleTrials(
    size=_SIZE,
    sets=2,
    integers=Integers(-127, 127, 2),
    reach=127,
    factors=np.geomspace(0.75, 1.5, 16).astype(np.float32),
    spreads=np.array([1.05], np.float32),
    signs=1,
    has_half=False,
)


@inlinable
def _word_of(codes: IntTile, four: int) -> Ints:
    """Return the word that decodes to a four: bit k is the exclusive or of bits k .. 15 of its codes."""
    word = splat(0)
    for i in range(4):
        word |= codes[place_in_four(four, i)] << 4 * i
    for shift in (1, 2, 4, 8):
        word ^= word >> shift
    return word


@row_quantizer(_IQ4_KSS_SEARCH, _CODING, IQ4_KSS)
def _quantize(codes: IntTile, integers: IntTile, seconds: IntTile, words: IntTile) -> None:
    for j in range(8):
        scale = integers[j] + 127 | seconds[j]
        for pair in range(4):
            word = splat(0)
            for half in range(2):
                k = 2 * pair + half
                word |= (_word_of(tail(codes, _SIZE * j), k) | scale >> k & 1) << 16 * half
            words[4 * j + pair] = word


FORMATS = (ik_format(IQ4_KSS, _SIZE, _quantize, _decode),)
