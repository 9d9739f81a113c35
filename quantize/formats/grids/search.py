"""The search off the grid: which neighbour of a lattice point is closest to the weights themselves.

Groups side by side, one per lane, differ in whether they need a search and in how many neighbours they have
to look at. So this search takes one group at a time and puts its neighbours side by side.

The squared error of a neighbour is a sum over the elements of a group, each of which has few levels: their
errors are computed once, as a table per element, and each neighbour picks one out of every table. The sum
runs in the reference's order, from the first element to the last.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from quantize.formats.grids.neighbours import COUNT_BITS
from quantize.formats.kernel import part
from quantize.formats.lane_items import item, least, look_up, lowest_bit, mask_word, put_item
from quantize.formats.lane_memory import Tile, float_tile, int_tile, load
from quantize.formats.lanes import LANES, Floats, Ints, lane_numbers, select, splat

NOWHERE = -1
"""In place of a code: no neighbour is at a distance that float32 can hold. ggml aborts in this case."""

_FARTHEST = np.float32(3.4028234663852886e38)
_LAST = 0x7FFFFFFF


@part
def nearest(
    lists: npt.NDArray[np.uint16],
    size: int,
    code_bits: int,
    values: Floats,
    x: Tile,
    weights: Tile,
    scale: Floats,
    entries: Ints,
) -> Ints:
    """Return codes of grid points: of a lane's own point if it is on the grid, else of its best neighbour.

    Best is the least sum of weight * (scale * value - x)**2, the first of equals; NOWHERE if none is below
    the largest float32. ggml's iq2_find_best_neighbour, iq3_find_best_neighbour, iq1_find_best_neighbour2.

    lists      GridTables.lists
    size, code_bits    of the grid, both constants
    values     a table for `look_up`: the value of each level; of 4 levels twice, as it sees 3 bits of a code
    x, weights Tiles of `size` Floats
    entries    GridTables.entries of the lanes' points; a lane that must not be searched may pass any code
    """
    found, scales = int_tile(1), float_tile(1)
    found[0], scales[0] = entries, scale
    pending = mask_word(entries < 0)
    while pending != 0:
        lane = lowest_bit(pending)
        pending &= pending - 1
        place = ~item(found, 0, lane)
        scaled = values * item(scales, 0, lane)
        best = _best_neighbour(lists, size, code_bits, scaled, x, weights, lane, place)
        put_item(found, 0, lane, np.int32(best))
    return found[0]


@part
def _best_neighbour(
    lists: npt.NDArray[np.uint16],
    size: int,
    code_bits: int,
    scaled: Floats,
    x: Tile,
    weights: Tile,
    lane: int,
    place: int,
) -> int:
    """Return the code of the best neighbour of one lane, whose list is at `place`; or NOWHERE."""
    errors = float_tile(8)
    for i in range(size):
        error = scaled - item(x, i, lane)
        errors[i] = error * item(weights, i, lane) * error
    best, positions = splat(_FARTHEST), splat(0)
    start = place >> COUNT_BITS
    for chunk in range(start, start + (place & (1 << COUNT_BITS) - 1)):
        codes = load(lists, chunk * LANES)
        total = look_up(errors[0], codes)
        for i in range(1, size):
            total += look_up(errors[i], codes >> code_bits * i)
        closer = total < best
        best = select(closer, total, best)
        positions = select(closer, chunk * LANES, positions)
    shortest = least(best)
    if not shortest < _FARTHEST:
        return NOWHERE
    return lists[least(select(best == shortest, positions + lane_numbers(), _LAST))]
