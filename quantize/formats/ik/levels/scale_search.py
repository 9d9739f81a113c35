"""The search that ik_llama.cpp's non-linear types share: the scale of a group, an integer for each sub-block.

A group is a super-block of 256 weights or a whole row. It has one scale d, a float. Each of its sub-blocks
of 16 or 32 weights has an integer s and, in most types, a choice of two sets of levels. A weight is
d * s * level. Lanes are rows.

What is minimised is the sum of importance * (weight - x)**2. For a given d, each sub-block tries scales d * s
from far below to far above the one that puts its largest weight on the outermost level, with both signs and
both sets. The best d for the integers and codes that result follows by least squares, and with it the
neighbours of each integer are tried again.

ik_llama.cpp's searches weigh errors by importance * sqrt(2 * mean square + x**2), look for each sub-block's
scale as if it could be any number, near the one that its largest weight asks for, and round it afterwards.

Numbers are kept near 1 by a power of two for each group, so that no square of a finite weight overflows.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from quantize.simd.constants import INFINITY, ONE, ZERO
from quantize.simd.half import from_half_bits, to_half_bits
from quantize.simd.kernel import inlinable
from quantize.simd.lane_memory import FloatTile, float_tile, load, store
from quantize.simd.lanes import (
    LANES,
    Floats,
    absolute,
    bits,
    from_bits,
    maximum,
    minimum,
    select,
    splat,
)
from quantize.simd.rounding import MAGIC
from quantize.simd.tiles import load_columns

Rows = npt.NDArray[Any]


class Integers(NamedTuple):
    """The integers that a sub-block's scale can be: low, low + step, ... high; step 2 leaves odd ones."""

    low: int
    high: int
    step: int


class Coding(NamedTuple):
    """What is made of a sub-block x, a Tile of Floats, of given scale and set: functions of kernels.

    error_of(x, importances, column, scale, second) -> Floats
        the sum of importance * error**2, for set 0 or 1, a float32; NaN or infinite where the scale is 0
    sums_of(x, importances, column, scale, second) -> Floats, Floats
        the sums of importance * level * x and of importance * level**2, sets being Floats
    codes_of(x, importances, column, scale, second, codes)
        fills `codes`, Ints

    importances  float32 (n_cols,); those of x begin at `column`
    """

    error_of: Any
    sums_of: Any
    codes_of: Any


class Search(NamedTuple):
    """What is tried for one type.

    size      weights of a sub-block
    sets      number of sets of levels
    integers  what the scales can be
    reach     magnitude of the outermost level
    factors   scales that are tried, as multiples of the one that puts the largest weight on that level
    spreads   values of d that are tried, as multiples of the one that lets the largest integer do so
    signs     2 if d is tried with both signs, which matters where an odd integer out is one of few
    has_half  whether d is stored as a float16
    """

    size: int
    sets: int
    integers: Integers
    reach: float
    factors: npt.NDArray[np.float32]
    spreads: npt.NDArray[np.float32]
    signs: int
    has_half: bool


class Group(NamedTuple):
    """What `fit_group` returns.

    d      as a reader finds it, infinite if it is too large
    power  what x is multiplied by
    """

    d: Floats
    power: Floats


@inlinable
def power_of(largest: Floats) -> Floats:
    """Return the power of two that brings `largest` to 1 .. 4; below 2**-126 it becomes less than 2."""
    exponent = minimum(bits(largest) >> 23 & 0xFF, 253)
    return from_bits((254 - exponent) << 23)


@inlinable
def inverse_of(power: Floats) -> Floats:
    """Return 1 / power for a result of `power_of`; 2**-127 has no bit of its exponent set."""
    exponent = 254 - (bits(power) >> 23)
    return from_bits(select(exponent > 0, exponent << 23, 1 << 22))


def fitting(search: Search, coding: Coding) -> Any:
    """Return the function of kernels that fits the groups of LANES rows.

        fit_group(source, n_cols, importances, first, column, count, scales, sets) -> Group

    It fills `scales` and `sets`, float32 of at least count // size * LANES items, with the integers and sets
    of the sub-blocks in columns column .. column + count - 1 of rows first .. first + LANES - 1.
    """
    error_of, sums_of, _codes_of = coding
    size, n_sets, n_signs = search.size, search.sets, search.signs
    low, high, step = (np.float32(number) for number in search.integers)
    odd = np.float32(search.integers.low % search.integers.step)
    has_zero = search.integers.step == 1
    inverse_step = np.float32(1 / search.integers.step)
    reach = np.float32(search.reach)
    most = np.float32(search.reach * max(-search.integers.low, search.integers.high))
    factors, spreads, has_half = search.factors, search.spreads, search.has_half

    @inlinable
    def legal(value: Floats) -> Floats:
        """Return the nearest integer that a scale can be."""
        near = (((value - odd) * inverse_step + MAGIC) - MAGIC) * step + odd
        return maximum(minimum(near, high), low)

    @inlinable
    def stored(d: Floats, power: Floats) -> Floats:
        unscaled = d * inverse_of(power)
        if has_half:
            return from_half_bits(to_half_bits(unscaled))
        return unscaled

    @inlinable
    def start_of(x: FloatTile, importances: npt.NDArray[np.float32], column: int) -> tuple[Floats, Floats]:
        """Return error and integer before anything is tried: those of 0 where it is an integer."""
        total = splat(ZERO)
        if has_zero:
            for i in range(size):
                total += importances[column + i] * (x[i] * x[i])
            return total, splat(ZERO)
        return total + INFINITY, splat(ONE)

    @inlinable
    def choose(
        x: FloatTile, importances: npt.NDArray[np.float32], column: int, d: Floats
    ) -> tuple[Floats, Floats, Floats]:
        """Return the least error of a sub-block, and the integer and the set that have it."""
        largest = splat(ZERO)
        for i in range(size):
            largest = maximum(largest, absolute(x[i]))
        base = largest / (reach * d)
        best, chosen = start_of(x, importances, column)
        chosen_set = splat(ZERO)
        for k in range(2 * factors.size):
            factor = factors[k >> 1]
            integer = legal(base * (-factor if k & 1 else factor))
            for number in range(n_sets):
                second = np.float32(number)
                error = error_of(x, importances, column, d * integer, second)
                better = error < best
                best = select(better, error, best)
                chosen = select(better, integer, chosen)
                chosen_set = select(better, second, chosen_set)
        return best, chosen, chosen_set

    @inlinable
    def choose_near(
        x: FloatTile, importances: npt.NDArray[np.float32], column: int, d: Floats, s: Floats
    ) -> tuple[Floats, Floats, Floats]:
        """Return what `choose` does, of s and its two neighbours."""
        best, chosen = start_of(x, importances, column)
        chosen_set = splat(ZERO)
        for k in range(-1, 2):
            integer = legal(s + np.float32(k) * step)
            for number in range(n_sets):
                second = np.float32(number)
                error = error_of(x, importances, column, d * integer, second)
                better = error < best
                best = select(better, error, best)
                chosen = select(better, integer, chosen)
                chosen_set = select(better, second, chosen_set)
        return best, chosen, chosen_set

    @inlinable
    def load_sub_block(
        source: Rows, n_cols: int, first: int, column: int, power: Floats, x: FloatTile
    ) -> None:
        load_columns(source, n_cols, first, column, size, x)
        for i in range(size):
            x[i] = x[i] * power

    @inlinable
    def add_sums(
        x: FloatTile,
        importances: npt.NDArray[np.float32],
        column: int,
        d: Floats,
        integer: Floats,
        second: Floats,
        sums: FloatTile,
    ) -> None:
        """Add to `sums`, two Floats, what the best d is the quotient of."""
        sum_lx, sum_l2 = sums_of(x, importances, column, d * integer, second)
        counts = (integer != ZERO) & (d != ZERO)
        sums[0] = sums[0] + select(counts, integer * sum_lx, ZERO)
        sums[1] = sums[1] + select(counts, integer * integer * sum_l2, ZERO)

    @inlinable
    def fit_group(
        source: Rows,
        n_cols: int,
        importances: npt.NDArray[np.float32],
        first: int,
        column: int,
        count: int,
        scales: npt.NDArray[np.float32],
        sets: npt.NDArray[np.float32],
    ) -> Group:
        x, sums = float_tile(32), float_tile(2)
        n_subs = count // size
        largest = splat(ZERO)
        for j in range(n_subs):
            load_columns(source, n_cols, first, column + size * j, size, x)
            for i in range(size):
                largest = maximum(largest, absolute(x[i]))
        power = power_of(largest)
        largest = largest * power

        tried = np.empty(n_subs * LANES, np.float32)
        scales[: n_subs * LANES] = ZERO
        least = splat(INFINITY)
        best_d = splat(ZERO)
        for trial in range(spreads.size * n_signs):
            d = largest * (spreads[trial // n_signs] / most)
            if trial % n_signs == 1:
                d = -d
            total = splat(ZERO)
            sums[0] = splat(ZERO)
            sums[1] = splat(ZERO)
            for j in range(n_subs):
                start = column + size * j
                load_sub_block(source, n_cols, first, start, power, x)
                error, integer, second = choose(x, importances, start, d)
                store(tried, j * LANES, integer)
                total += error
                add_sums(x, importances, start, d, integer, second, sums)
            better = (total < least) & (sums[1] > ZERO)
            least = select(better, total, least)
            best_d = select(better, sums[0] / sums[1], best_d)
            for j in range(0, n_subs * LANES, LANES):
                store(scales, j, select(better, load(tried, j), load(scales, j)))

        too_large = largest != largest
        for _ in range(2):
            d = stored(best_d, power) * power
            too_large |= absolute(d) == INFINITY
            sums[0] = splat(ZERO)
            sums[1] = splat(ZERO)
            for j in range(n_subs):
                start = column + size * j
                load_sub_block(source, n_cols, first, start, power, x)
                _error, integer, second = choose_near(x, importances, start, d, load(scales, j * LANES))
                store(scales, j * LANES, integer)
                store(sets, j * LANES, second)
                add_sums(x, importances, start, d, integer, second, sums)
            best_d = select(sums[1] > ZERO, sums[0] / sums[1], ZERO)
        return Group(select(too_large, INFINITY, stored(best_d, power)), power)

    return fit_group
