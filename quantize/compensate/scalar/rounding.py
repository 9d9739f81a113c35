"""The kernels that round one block of LANES rows at a time, with feedback from weight to weight.

A sub-block is tried under every candidate line: each weight takes the level next to it, its error is taken
off the weights after it, and the line with the least sum of squared errors wins. Rows are lanes, so that each
number of the factor is read once for all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from quantize.compensate.base import PANEL
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

ELEMS = PANEL
"""The most columns of a block."""

MOST_CANDIDATES = 64

ZERO = np.float32(0)
ONE = np.float32(1)
HALF = np.float32(0.5)

_WORDS = ELEMS // 4


@inlinable
def _nearest_of_even(value: Floats, levels: Floats32) -> Floats:
    return nearest_float(value, int(levels[0]), int(levels[levels.size - 1]))


@inlinable
def _nearest_of_any(value: Floats, levels: Floats32) -> Floats:
    nearest = value * ZERO + levels[0]
    for k in range(1, levels.size):
        nearest = select(value < HALF * (levels[k - 1] + levels[k]), nearest, levels[k])
    return nearest


@inlinable
def _code_of_even(level: Floats, levels: Floats32) -> Any:
    return to_int(level) - int(levels[0])


@inlinable
def _code_of_any(level: Floats, levels: Floats32) -> Any:
    code = splat(0)
    for k in range(1, levels.size):
        code = select(level < levels[k], code, k)
    return code


def _rounding(nearest: Callable[..., Any], code_of: Callable[..., Any]) -> Any:
    """Return what rounds blocks, given how a value becomes a level and a level a code."""

    @inlinable
    def round_sub_block(
        x: FloatTile,
        slope: Floats,
        low: Floats,
        upper: Floats32,
        inverses: Floats32,
        n: int,
        start: int,
        sub_elems: int,
        levels: Floats32,
        errors: FloatTile,
        chosen: FloatTile,
    ) -> Floats:
        """Return what a sub-block costs under one line, and fill its errors and levels."""
        inverse_slope = select(slope == ZERO, ZERO, ONE / slope)
        for i in range(sub_elems):
            errors[i] = x[i]
        cost = zero_like(x)
        for i in range(sub_elems):
            level = nearest((errors[i] + low) * inverse_slope, levels)
            error = (errors[i] - (slope * level - low)) * inverses[start + i]
            cost += error * error
            chosen[i] = level
            errors[i] = error
            for k in range(i + 1, sub_elems):
                errors[k] = errors[k] - error * upper[(start + i) * n + start + k]
        return cost

    @inlinable
    def round_blocks(
        rows: Floats32,
        upper: Floats32,
        n: int,
        sub_elems: int,
        levels: Floats32,
        slopes: Floats32,
        lows: Floats32,
        n_candidates: int,
        codes: npt.NDArray[np.uint8],
        choices: npt.NDArray[np.int32],
    ) -> None:
        x, errors, chosen = float_tile(ELEMS), float_tile(ELEMS), float_tile(ELEMS)
        slope_of, low_of = float_tile(MOST_CANDIDATES), float_tile(MOST_CANDIDATES)
        costs = float_tile(MOST_CANDIDATES)
        out, words = int_tile(ELEMS), int_tile(_WORDS)
        pairs = beside(x, 0)
        both, both_levels = tile_like(pairs, ELEMS), tile_like(pairs, ELEMS)
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
                twice = beside(tail(x, start), 0)
                for c in range(0, n_candidates, 2):
                    both_slopes, both_lows = beside(tail(slope_of, c), 1)[0], beside(tail(low_of, c), 1)[0]
                    beside(tail(costs, c), 1)[0] = round_sub_block(
                        twice,
                        both_slopes,
                        both_lows,
                        upper,
                        inverses,
                        n,
                        start,
                        sub_elems,
                        levels,
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
                round_sub_block(
                    tail(x, start), slope, low, upper, inverses, n, start, sub_elems, levels, errors, chosen
                )
                store(choices, j * padded + first, choice)
                for i in range(sub_elems):
                    out[start + i] = code_of(chosen[i], levels)
                for k in range(start + sub_elems, n):
                    value = x[k]
                    for i in range(sub_elems):
                        value -= errors[i] * upper[(start + i) * n + k]
                    x[k] = value
            pack(out, 0, 8, n, n, words)
            store_blocks(words, codes, first, n)

    return round_blocks


_round_evenly = _rounding(_nearest_of_even, _code_of_even)
_round_unevenly = _rounding(_nearest_of_any, _code_of_any)


@kernel
def round_evenly(
    rows: Floats32,
    upper: Floats32,
    n: int,
    sub_elems: int,
    levels: Floats32,
    slopes: Floats32,
    lows: Floats32,
    n_candidates: int,
    codes: npt.NDArray[np.uint8],
    choices: npt.NDArray[np.int32],
) -> None:
    """Fill codes and choices of one block of each row; levels are successive integers.

    rows          (n_rows * n,), n <= ELEMS a multiple of LANES
    upper         (n * n,), of the factor
    levels        ascending
    slopes, lows  (sub-blocks * n_candidates * padded,), padded n_rows rounded up to LANES: the candidates,
                  an even number up to MOST_CANDIDATES
    codes         (n_rows * n,), number of the level
    choices       (sub-blocks * padded,), number of the candidate
    """
    _round_evenly(rows, upper, n, sub_elems, levels, slopes, lows, n_candidates, codes, choices)


@kernel
def round_unevenly(
    rows: Floats32,
    upper: Floats32,
    n: int,
    sub_elems: int,
    levels: Floats32,
    slopes: Floats32,
    lows: Floats32,
    n_candidates: int,
    codes: npt.NDArray[np.uint8],
    choices: npt.NDArray[np.int32],
) -> None:
    """Fill codes and choices as `round_evenly` does, for any levels."""
    _round_unevenly(rows, upper, n, sub_elems, levels, slopes, lows, n_candidates, codes, choices)
