"""The kernel that rounds one block of LANES rows at a time, with feedback from weight to weight.

A sub-block is tried under every candidate line: each weight takes the level next to it, its error is taken
off the weights after it, and the line with the least sum of squared errors wins. Rows are lanes, so that each
number of the factor is read once for all of them.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from quantize.formats.base import Floats32
from quantize.simd.kernel import inlinable, kernel
from quantize.simd.lane_memory import (
    FloatTile,
    beside,
    float_tile,
    int_tile,
    load,
    store,
    tail,
    tile_like,
    zero_like,
)
from quantize.simd.lanes import LANES, Floats, select, splat, to_int
from quantize.simd.packing import pack
from quantize.simd.rounding import nearest_float
from quantize.simd.tiles import load_blocks, store_blocks

ELEMS = 256
"""The most elements of a block."""

MOST_CANDIDATES = 64

_WORDS = ELEMS // 4

ZERO = np.float32(0)
ONE = np.float32(1)


@kernel
def round_evenly(
    rows: Floats32,
    upper: Floats32,
    n: int,
    sub_elems: int,
    slopes: Floats32,
    lows: Floats32,
    n_candidates: int,
    lowest: int,
    highest: int,
    codes: npt.NDArray[np.uint8],
    choices: npt.NDArray[np.int32],
) -> None:
    """Fill codes and choices of one block of each row; levels are the integers lowest .. highest.

    rows          (n_rows * n,), n <= ELEMS a multiple of LANES
    upper         (n * n,), of the factor
    slopes, lows  (sub-blocks * n_candidates * padded,), padded n_rows rounded up to LANES: the candidates,
                  an even number up to MOST_CANDIDATES
    codes         (n_rows * n,), number of the level counted from the lowest
    choices       (sub-blocks * padded,), number of the candidate
    """
    x, rest, levels = float_tile(ELEMS), float_tile(32), float_tile(32)
    slope_of, low_of, costs = (
        float_tile(MOST_CANDIDATES),
        float_tile(MOST_CANDIDATES),
        float_tile(MOST_CANDIDATES),
    )
    out, words = int_tile(ELEMS), int_tile(_WORDS)
    inverses = np.empty(n, np.float32)
    for i in range(n):
        inverses[i] = ONE / upper[i * n + i]
    n_rows = rows.size // n
    padded = -(-n_rows // LANES) * LANES
    for first in range(0, n_rows, LANES):
        load_blocks(rows, first, n, x)
        for j in range(n // sub_elems):
            start = j * sub_elems
            for c in range(n_candidates):
                at = (j * n_candidates + c) * padded + first
                slope_of[c] = load(slopes, at)
                low_of[c] = load(lows, at)
            pairs = beside(tail(x, start), 0)
            both, both_levels = tile_like(pairs, 32), tile_like(pairs, 32)
            for c in range(0, n_candidates, 2):
                both_slopes, both_lows = beside(tail(slope_of, c), 1)[0], beside(tail(low_of, c), 1)[0]
                beside(tail(costs, c), 1)[0] = _round_sub_block(
                    pairs,
                    both_slopes,
                    both_lows,
                    upper,
                    inverses,
                    n,
                    start,
                    sub_elems,
                    lowest,
                    highest,
                    both,
                    both_levels,
                )
            best = costs[0]
            choice = splat(0)
            slope, low = slope_of[0], low_of[0]
            for c in range(1, n_candidates):
                better = costs[c] < best
                best = select(better, costs[c], best)
                choice = select(better, c, choice)
                slope = select(better, slope_of[c], slope)
                low = select(better, low_of[c], low)
            _round_sub_block(
                tail(x, start),
                slope,
                low,
                upper,
                inverses,
                n,
                start,
                sub_elems,
                lowest,
                highest,
                rest,
                levels,
            )
            store(choices, j * padded + first, choice)
            for i in range(sub_elems):
                out[start + i] = to_int(levels[i]) - lowest
            for k in range(start + sub_elems, n):
                value = x[k]
                for i in range(sub_elems):
                    value -= rest[i] * upper[(start + i) * n + k]
                x[k] = value
        pack(out, 0, 8, n, n, words)
        store_blocks(words, codes, first, n)


@inlinable
def _round_sub_block(
    x: FloatTile,
    slope: Floats,
    low: Floats,
    upper: Floats32,
    inverses: Floats32,
    n: int,
    start: int,
    sub_elems: int,
    lowest: int,
    highest: int,
    rest: FloatTile,
    levels: FloatTile,
) -> Floats:
    """Return what a sub-block costs under one line, and fill `levels`, and `rest` with its errors."""
    inverse_slope = select(slope == ZERO, ZERO, ONE / slope)
    for i in range(sub_elems):
        rest[i] = x[i]
    cost = zero_like(x)
    for i in range(sub_elems):
        level = nearest_float((rest[i] + low) * inverse_slope, lowest, highest)
        error = (rest[i] - (slope * level - low)) * inverses[start + i]
        cost += error * error
        levels[i] = level
        rest[i] = error
        for k in range(i + 1, sub_elems):
            rest[k] = rest[k] - error * upper[(start + i) * n + start + k]
    return cost
