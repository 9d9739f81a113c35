"""The search off the grid as in `cached_search_4`, for groups of 8 elements of 3 levels.

Rounding: let e = 2**-24, W the sum of the weights, X the largest |x|, R = 5 * s + X, which bounds s * q - x.
A difference s * q - x is off by at most 2 e R, its square times w by 6 e w R**2, and a sum of eight by
14 e W R**2 in all. A lead at scale t, s / 2 <= t <= s, divided by t, is computed from two such errors at s,
compared by ggml from two others at t, and moved from s to t by sums of squares that are off by 9 e * 25 W.
This is below e W (1800 s + 620 X + 62 X**2 / t). The margin is e W (4096 S + 1024 X + 128 X**2 / T),
where S and T are the highest and the lowest scale there will be.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from quantize.formats.iq.grids import COUNT_BITS, NOWHERE, GridTables
from quantize.formats.iq.grids.cached_search_4 import Answers, first_position, preparation, room
from quantize.simd.floats import INFINITY, ONE
from quantize.simd.kernel import inlinable, inlined
from quantize.simd.lane_items import item, least, lowest_bit, mask_word, put_item
from quantize.simd.lane_memory import FloatTile, float_tile, tail, zero_like
from quantize.simd.lanes import LANES, Floats, Ints, all_lanes, minimum, select, to_float
from quantize.simd.octets import EIGHT, eight_numbers, float_eights, load_eight, look_up_eight

GROUP = 8
"""Number of elements in a group; their levels take 2 bits of a code and stand for 1, 3, 5."""

MOST_OCTETS = 40
"""Largest number of octets of codes in a list."""

Tables = tuple[Floats, Floats, Floats, Floats, Floats, Floats, Floats, Floats]

_FARTHEST = np.float32(3.4028234663852886e38)


prepare = preparation(GROUP, np.float32(2.0**-12), np.float32(2.0**-5))


@inlinable
def answer(
    tables: GridTables,
    x: FloatTile,
    weights: FloatTile,
    scale: Floats,
    inverse: Floats,
    lowest: Floats,
    n_groups: int,
    answers: Answers,
) -> None:
    """Fill the codes, where wanted, as `cached_search_4.answer` does; ggml's iq2_find_best_neighbour.

    Where that takes no search, as the point is on the grid, the limit is negative, else positive.

    tables      made with width EIGHT
    x, weights  Tiles of n_groups * GROUP Floats
    scale       not above that of the call before; inverse: about its inverse
    lowest      a little less than the lowest scale there will be, and more than half of the highest
    n_groups    at most 64 / LANES
    """
    scales = float_tile(3)
    scales[0], scales[1], scales[2] = scale, inverse, lowest
    pending = 0
    for k in range(n_groups):
        stale = (answers.numbers[k] != answers.known[k]) | ~(scale > answers.limits[k])
        pending |= mask_word(stale & (answers.wanted[k] != 0)) << LANES * k
        answers.known[k] = answers.numbers[k]
    while pending != 0:  # one loop for all groups: the processor seldom foresees its end
        bit = lowest_bit(pending)
        pending &= pending - 1
        group, lane = bit // LANES, bit % LANES
        entry = tables.entries[item(answers.numbers, group, lane)]
        limit = -ONE
        if entry < 0:
            ours, costs = tail(x, GROUP * group), tail(weights, GROUP * group)
            margin = item(answers.margins, group, lane)
            entry, limit = _search(tables.lists, ours, costs, lane, scales, margin, ~entry)
        put_item(answers.codes, group, lane, np.int32(entry))
        put_item(answers.limits, group, lane, limit)


@inlined
def _search(
    lists: npt.NDArray[np.uint16],
    x: FloatTile,
    weights: FloatTile,
    lane: int,
    scales: FloatTile,
    margin: np.float32,
    place: int,
) -> tuple[int, np.float32]:
    """Return the code of the best neighbour of one lane, or NOWHERE, and the limit of this answer.

    scales  the scale, its inverse, and the lowest one
    place   of the list
    """
    scale, inverse = item(scales, 0, lane), item(scales, 1, lane)
    values = to_float((eight_numbers() & 3) * 2 + 1)  # twice, as a look-up sees 3 bits of a code
    errors = _error_tables(values * scale, x, weights, lane)
    start = (place >> COUNT_BITS) * EIGHT
    n_codes = (place & (1 << COUNT_BITS) - 1) * EIGHT
    totals = float_eights(MOST_OCTETS)
    best = zero_like(totals) + _FARTHEST
    positions = eight_numbers()
    for first in range(0, n_codes, EIGHT):
        codes = load_eight(lists, start + first)
        total = _sum(errors, codes)
        positions = select(total < best, eight_numbers() + first, positions)
        best = minimum(total, best)
        totals[first // EIGHT] = total
    shortest = least(best)
    if not shortest < _FARTHEST:
        return NOWHERE, INFINITY
    winner = lists[start + first_position(best == shortest, positions)]
    if margin == INFINITY:
        return winner, INFINITY

    tables = _square_tables(values * values, weights, lane)
    none = eight_numbers() & 0
    winner_squares = _sum(tables, none + winner)
    by_level = tables[0] + tables[1] + tables[2] + tables[3] + tables[4] + tables[5] + tables[6] + tables[7]
    most_growth = look_up_eight(by_level, none + 2) - winner_squares
    most_room = scale - item(scales, 2, lane)
    closest = zero_like(totals) + most_room
    for first in range(0, n_codes, EIGHT):
        lead = (totals[first // EIGHT] - shortest) * inverse - margin
        if not all_lanes(lead >= most_growth * most_room):  # most neighbours are too far behind
            codes = load_eight(lists, start + first)
            growth = _sum(tables, codes) - winner_squares
            closest = minimum(room(lead, growth, codes == winner, most_room), closest)
    return winner, scale - least(closest)


@inlined
def _sum(tables: Tables, codes: Ints) -> Floats:
    """Return the sums, in order, of what eight tables have for the levels of codes.

    Spelt out, as LLVM does not unroll a loop: so tables stay in registers, and shifts are constants.
    """
    total = look_up_eight(tables[0], codes) + look_up_eight(tables[1], codes >> 2)
    total += look_up_eight(tables[2], codes >> 4)
    total += look_up_eight(tables[3], codes >> 6)
    total += look_up_eight(tables[4], codes >> 8)
    total += look_up_eight(tables[5], codes >> 10)
    total += look_up_eight(tables[6], codes >> 12)
    return total + look_up_eight(tables[7], codes >> 14)


@inlined
def _error_tables(scaled: Floats, x: FloatTile, weights: FloatTile, lane: int) -> Tables:
    """Return the tables of errors of the elements of one lane, spelt out as `_sum` is."""
    return (
        _errors(scaled, x, weights, 0, lane),
        _errors(scaled, x, weights, 1, lane),
        _errors(scaled, x, weights, 2, lane),
        _errors(scaled, x, weights, 3, lane),
        _errors(scaled, x, weights, 4, lane),
        _errors(scaled, x, weights, 5, lane),
        _errors(scaled, x, weights, 6, lane),
        _errors(scaled, x, weights, 7, lane),
    )


@inlined
def _square_tables(squares: Floats, weights: FloatTile, lane: int) -> Tables:
    """Return the tables of weight * level**2 of the elements of one lane."""
    return (
        squares * item(weights, 0, lane),
        squares * item(weights, 1, lane),
        squares * item(weights, 2, lane),
        squares * item(weights, 3, lane),
        squares * item(weights, 4, lane),
        squares * item(weights, 5, lane),
        squares * item(weights, 6, lane),
        squares * item(weights, 7, lane),
    )


@inlined
def _errors(scaled: Floats, x: FloatTile, weights: FloatTile, i: int, lane: int) -> Floats:
    """Return the table of errors of element i of one lane: one for each level."""
    error = scaled - item(x, i, lane)
    return error * item(weights, i, lane) * error
