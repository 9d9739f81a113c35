"""The search off the grid, for groups of 4, while a scale falls: answers are kept as long as they must hold.

A search for the best scale goes through candidates with falling scales. From one to the next few groups get
another lattice point, and while a group keeps its point, it keeps its neighbours too. With neighbour q,
weights w and scale s the error is

    f(s) = sum w * (s * q - x)**2 = s**2 * sum w * q**2 - 2 * s * sum w * q * x + sum w * x**2

so the lead of the winner over another neighbour, divided by s, is linear in s: from the two errors at one
scale and the two sums of w * q**2 follows the scale at which they tie. The largest of these is the limit down
to which an answer is kept. Leads that rounding could make are no leads.

Rounding: let e = 2**-24, W the sum of the weights, X the largest |x|, R = 15 * s + X, which bounds s * q - x.
A difference s * q - x is off by at most 2 e R, its square times w by 6 e w R**2, and a sum of four by
10 e W R**2 in all. A lead at scale t, s / 2 <= t <= s, divided by t, is computed from two such errors at s,
compared by ggml from two others at t, and moved from s to t by sums of squares that are off by 11 e * 225 W.
This is below e W (11000 s + 1300 X + 70 X**2 / t). The margin is e W (16384 S + 4096 X + 256 X**2 / T),
where S and T are the highest and the lowest scale there will be.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from quantize.formats.iq.grids import COUNT_BITS, NOWHERE, GridTables
from quantize.simd.floats import HALF, INFINITY, ONE, QUARTER, ZERO
from quantize.simd.kernel import inlinable, inlined
from quantize.simd.lane_items import item, least, lowest_bit, mask_word, put_item
from quantize.simd.lane_memory import FloatTile, IntTile, float_tile, int_tile, tail, zero_like
from quantize.simd.lanes import LANES, Floats, Ints, Mask, absolute, maximum, minimum, select, splat, to_float
from quantize.simd.octets import EIGHT, eight_numbers, float_eights, int_eights, load_eight, look_up_eight

GROUP = 4
"""Number of elements in a group; their levels take 3 bits of a code and stand for 1, 3 .. 15."""

MOST_OCTETS = 8
"""Largest number of octets of codes in a list."""

Tables = tuple[Floats, Floats, Floats, Floats]

MOST_GROUPS = 8
"""Largest number of groups in one call."""

_QUEUE_TILES = 2 * MOST_GROUPS
_FARTHEST = np.float32(3.4028234663852886e38)
_LAST = 0x7FFFFFFF
_WORD_GROUPS = 64 // LANES


# Within these no product underflows to where the bound on rounding fails, and none overflows.
_LEAST_SCALE, _MOST_SCALE = np.float32(2.0**-30), np.float32(2.0**30)
_LEAST_WEIGHT, _MOST_WEIGHT = np.float32(2.0**-40), np.float32(2.0**60)


class Answers(NamedTuple):
    """Questions and answers for the groups of a sub-block: Tiles of one vector per group.

    wanted   Ints, not 0 where an answer is wanted
    numbers  Ints, the lattice points to find a grid point for
    known    Ints, the lattice points that `codes` answer, or -1
    codes    Ints, the answers: codes of grid points, or NOWHERE
    limits   Floats, an answer is kept for scales above
    margins  Floats, what a lead, divided by the scale, must be to count
    """

    wanted: IntTile
    numbers: IntTile
    known: IntTile
    codes: IntTile
    limits: FloatTile
    margins: FloatTile


def preparation(group: int, margin: np.float32, spread_of_squares: np.float32) -> Any:
    """Return the function of kernels that gets `Answers` ready for a sub-block.

        prepare(x, weights, lowest, highest, n_groups, answers)

    Scales are to fall from highest to lowest. In the letters of the module's docstring, the margin of a group
    is margin * W * (S + X / 4 + spread_of_squares * X**2 / T).
    """

    @inlinable
    def prepare(
        x: FloatTile, weights: FloatTile, lowest: Floats, highest: Floats, n_groups: int, answers: Answers
    ) -> None:
        steady = (lowest > _LEAST_SCALE) & (highest < _MOST_SCALE)
        for k in range(n_groups):
            weight_sum, largest = splat(ZERO), splat(ZERO)
            for i in range(group * k, group * (k + 1)):
                weight_sum += weights[i]
                largest = maximum(absolute(x[i]), largest)
            tame = steady & (largest < _MOST_SCALE)
            tame &= (weight_sum > _LEAST_WEIGHT) & (weight_sum < _MOST_WEIGHT)
            spread = highest + QUARTER * largest + spread_of_squares * largest * largest / lowest
            answers.known[k] = splat(-1)
            answers.margins[k] = select(tame, margin * weight_sum * spread, INFINITY)

    return prepare


prepare = preparation(GROUP, np.float32(2.0**-10), np.float32(2.0**-6))


@inlinable
def prepare_once(n_groups: int, answers: Answers) -> None:
    """Get `answers` ready for one scale."""
    for k in range(n_groups):
        answers.known[k] = splat(-1)
        answers.margins[k] = splat(INFINITY)


@inlined
def answer(
    tables: GridTables,
    x: FloatTile,
    weights: FloatTile,
    scale: Floats,
    inverse: Floats,
    n_groups: int,
    answers: Answers,
) -> None:
    """Fill the codes, where they are wanted: of the numbers' own points, or else of best neighbours.

    Best is the least sum of weight * (scale * value - x)**2, added up from the first element to the last; the
    first of equals; NOWHERE if none is below the largest float32. ggml's iq3_find_best_neighbour.

    tables      made with width EIGHT
    x, weights  Tiles of n_groups * GROUP Floats
    scale       not above that of the call before; inverse: about its inverse
    n_groups    a multiple of 64 / LANES, at most MOST_GROUPS
    """
    scales = float_tile(2)
    scales[0], scales[1] = scale, inverse
    short, long = int_tile(_QUEUE_TILES), int_tile(_QUEUE_TILES)
    n_short, n_long = _line_up(tables, scale, n_groups, answers, short, long)
    _serve_short(tables.lists, x, weights, scales, answers, short, n_short)
    _serve_long(tables.lists, x, weights, scales, answers, long, n_long)


@inlined
def _line_up(
    tables: GridTables, scale: Floats, n_groups: int, answers: Answers, short: IntTile, long: IntTile
) -> tuple[int, int]:
    """Answer what needs no search, and fill two queues with the rest; return how many wait in each.

    Lists of one octet are searched apart: with both kinds mixed, the processor would not foresee which comes
    next. Nor must it here: everybody is put at the end of both queues, and one of them grows.

    short, long  Tiles of _QUEUE_TILES Ints: number of group and lane, and place of the list, for each
    """
    n_short = 0
    n_long = 0
    for first in range(0, n_groups, _WORD_GROUPS):
        pending = 0
        for k in range(_WORD_GROUPS):
            group = first + k
            stale = (answers.numbers[group] != answers.known[group]) | ~(scale > answers.limits[group])
            pending |= mask_word(stale & (answers.wanted[group] != 0)) << LANES * k
            answers.known[group] = answers.numbers[group]
        while pending != 0:  # one loop for several groups: the processor seldom foresees its end
            bit = lowest_bit(pending)
            pending &= pending - 1
            group, lane = first + bit // LANES, bit % LANES
            entry = tables.entries[item(answers.numbers, group, lane)]
            put_item(answers.codes, group, lane, np.int32(entry))
            put_item(answers.limits, group, lane, -ONE)
            asked, place = np.int32(group * LANES + lane), np.int32(~entry)
            put_item(short, 0, 2 * n_short, asked)
            put_item(short, 0, 2 * n_short + 1, place)
            put_item(long, 0, 2 * n_long, asked)
            put_item(long, 0, 2 * n_long + 1, place)
            n_octets = ~entry & (1 << COUNT_BITS) - 1
            n_short += (entry < 0) & (n_octets == 1)
            n_long += (entry < 0) & (n_octets > 1)
    return n_short, n_long


def _serve(search: Callable[..., Any]) -> Any:
    """Return the function that answers all in a queue by a search."""

    @inlined
    def serve(
        lists: npt.NDArray[np.uint16],
        x: FloatTile,
        weights: FloatTile,
        scales: FloatTile,
        answers: Answers,
        queue: IntTile,
        count: int,
    ) -> None:
        for n in range(count):
            asked, place = item(queue, 0, 2 * n), item(queue, 0, 2 * n + 1)
            group, lane = asked // LANES, asked % LANES
            ours, costs = tail(x, GROUP * group), tail(weights, GROUP * group)
            margin = item(answers.margins, group, lane)
            code, limit = search(lists, ours, costs, lane, scales, margin, place)
            put_item(answers.codes, group, lane, np.int32(code))
            put_item(answers.limits, group, lane, limit)

    return serve


@inlined
def _search_short(
    lists: npt.NDArray[np.uint16],
    x: FloatTile,
    weights: FloatTile,
    lane: int,
    scales: FloatTile,
    margin: np.float32,
    place: int,
) -> tuple[int, np.float32]:
    """Return the code of the best neighbour of one lane, or NOWHERE, and the limit of this answer.

    scales  the scale and its inverse
    place   of the list, which is one octet
    """
    scale, inverse = item(scales, 0, lane), item(scales, 1, lane)
    errors, squares = _tables(x, weights, lane, scale)
    start = (place >> COUNT_BITS) * EIGHT
    codes = load_eight(lists, start)
    total, square_sum = _sum(errors, codes), _sum(squares, codes)
    shortest = least(minimum(total, _FARTHEST))
    if not shortest < _FARTHEST:
        return NOWHERE, INFINITY
    position = lowest_bit(mask_word(total == shortest))
    winner = lists[start + position]
    if margin == INFINITY:
        return winner, INFINITY
    winners = float_eights(1)
    winners[0] = square_sum
    lead = (total - shortest) * inverse - margin
    growth = square_sum - item(winners, 0, position)
    return winner, scale - least(room(lead, growth, codes == winner, HALF * scale))


@inlined
def _search_long(
    lists: npt.NDArray[np.uint16],
    x: FloatTile,
    weights: FloatTile,
    lane: int,
    scales: FloatTile,
    margin: np.float32,
    place: int,
) -> tuple[int, np.float32]:
    """Search as `_search_short` does, in a list of up to MOST_OCTETS octets."""
    scale, inverse = item(scales, 0, lane), item(scales, 1, lane)
    errors, squares = _tables(x, weights, lane, scale)
    start = (place >> COUNT_BITS) * EIGHT
    n_codes = (place & (1 << COUNT_BITS) - 1) * EIGHT
    totals, square_sums = float_eights(MOST_OCTETS), float_eights(MOST_OCTETS)
    codes = load_eight(lists, start)
    total, best_square_sum = _sum(errors, codes), _sum(squares, codes)
    best, positions = minimum(total, _FARTHEST), eight_numbers()
    totals[0], square_sums[0] = total, best_square_sum
    for first in range(EIGHT, n_codes, EIGHT):
        codes = load_eight(lists, start + first)
        total, square_sum = _sum(errors, codes), _sum(squares, codes)
        closer = total < best
        best = select(closer, total, best)
        best_square_sum = select(closer, square_sum, best_square_sum)
        positions = select(closer, eight_numbers() + first, positions)
        totals[first // EIGHT], square_sums[first // EIGHT] = total, square_sum
    shortest = least(best)
    if not shortest < _FARTHEST:
        return NOWHERE, INFINITY
    position = first_position(best == shortest, positions)
    winner = lists[start + position]
    if margin == INFINITY:
        return winner, INFINITY
    winners = float_eights(1)
    winners[0] = best_square_sum
    winner_squares = item(winners, 0, position % EIGHT)
    most_room = HALF * scale
    least_room = zero_like(totals) + most_room
    for first in range(0, n_codes, EIGHT):
        lead = (totals[first // EIGHT] - shortest) * inverse - margin
        growth = square_sums[first // EIGHT] - winner_squares
        is_winner = load_eight(lists, start + first) == winner
        least_room = minimum(room(lead, growth, is_winner, most_room), least_room)
    return winner, scale - least(least_room)


_serve_short, _serve_long = _serve(_search_short), _serve(_search_long)


@inlined
def room(lead: Floats, growth: Floats, is_winner: Mask, most_room: np.float32) -> Floats:
    """Return how far the scale may fall before each neighbour could win: up to most_room; -1: it could now.

    lead    of the winner, divided by the scale, less the margin; a fall of the scale takes growth times it
    """
    found = select(growth * most_room > lead, lead / growth, most_room)
    found = select(lead > ZERO, found, -ONE)
    return select(is_winner, most_room, found)


@inlined
def _tables(x: FloatTile, weights: FloatTile, lane: int, scale: np.float32) -> tuple[Tables, Tables]:
    """Return, for each element, tables by level: of errors, and of weighted squares of values."""
    values = to_float(eight_numbers() * 2 + 1)
    scaled, squares = values * scale, values * values
    w0, w1, w2, w3 = (
        item(weights, 0, lane),
        item(weights, 1, lane),
        item(weights, 2, lane),
        item(weights, 3, lane),
    )
    e0, e1 = scaled - item(x, 0, lane), scaled - item(x, 1, lane)
    e2, e3 = scaled - item(x, 2, lane), scaled - item(x, 3, lane)
    errors = e0 * w0 * e0, e1 * w1 * e1, e2 * w2 * e2, e3 * w3 * e3
    return errors, (squares * w0, squares * w1, squares * w2, squares * w3)


@inlined
def _sum(tables: Tables, codes: Ints) -> Floats:
    """Return the sums, in order, of what four tables have for the levels of codes."""
    total = look_up_eight(tables[0], codes) + look_up_eight(tables[1], codes >> 3)
    return total + look_up_eight(tables[2], codes >> 6) + look_up_eight(tables[3], codes >> 9)


@inlined
def first_position(best: Mask, positions: Ints) -> int:
    """Return the least of the positions where the Mask `best` holds, which it does somewhere."""
    tile = int_eights(1)
    tile[0] = positions
    ties = mask_word(best)
    if ties & ties - 1 != 0:
        return least(select(best, positions, _LAST))
    return item(tile, 0, lowest_bit(ties))
