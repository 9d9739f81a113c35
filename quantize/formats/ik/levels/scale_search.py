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

`row_quantizer` and `block_quantizer` make the kernels, over rows and over the super-blocks of rows. A type
says how its codes, the integers of its sub-blocks and their sets are packed. The rest is the same for all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from gguf_tools.format.ggml_types import GGMLType
from quantize.formats.base import Bytes, Floats32
from quantize.formats.ik.rows import SUPER_ELEMS, first_infinite, store_in_rows
from quantize.simd.floats import INFINITY, MAGIC, ONE, ZERO, from_half_bits, to_half_bits
from quantize.simd.kernel import inlinable, kernel_of
from quantize.simd.lane_memory import FloatTile, IntTile, float_tile, int_tile, load, store, tail
from quantize.simd.lanes import (
    LANES,
    Floats,
    Ints,
    absolute,
    bits,
    from_bits,
    maximum,
    minimum,
    select,
    splat,
    to_int,
)
from quantize.simd.tiles import load_columns, padded_words


class Integers(NamedTuple):
    """The integers that a sub-block's scale can be: low, low + step, ... high; step 2 leaves odd ones."""

    low: int
    high: int
    step: int


class Coding(NamedTuple):
    """Functions of kernels for a sub-block x, a Tile of Floats, of given scale and set.

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


class ScaleTrials(NamedTuple):
    """Trials for one type.

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
    factors: Floats32
    spreads: Floats32
    signs: int
    has_half: bool


class LaneRows(NamedTuple):
    """Rows first .. first + LANES - 1, one to a lane.

    source       float32, all rows
    importances  float32 (n_cols,)
    """

    source: Floats32
    importances: Floats32
    first: int


class Fitted(NamedTuple):
    """Integers and sets of sub-blocks, float32: LANES of each for every sub-block."""

    scales: Floats32
    sets: Floats32


class Group(NamedTuple):
    """Result of `fit_group`.

    d      as a reader finds it, infinite if it is too large
    power  what x is multiplied by
    """

    d: Floats
    power: Floats


class _Chosen(NamedTuple):
    """The least error of a sub-block, and the integer and the set that have it."""

    error: Floats
    integer: Floats
    second: Floats


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


def _nearest_of(integers: Integers) -> Any:
    """Return the function of kernels that takes a number to the nearest integer that a scale can be."""
    low, high, step = (np.float32(number) for number in integers)
    odd, inverse_step = np.float32(integers.low % integers.step), np.float32(1 / integers.step)

    @inlinable
    def legal(value: Floats) -> Floats:
        near = (((value - odd) * inverse_step + MAGIC) - MAGIC) * step + odd
        return maximum(minimum(near, high), low)

    return legal


def _choosing(search: ScaleTrials, coding: Coding) -> Any:
    """Return two functions of kernels that choose integer and set of a sub-block x, given d.

    choose(x, importances, column, d) -> _Chosen
        of all that is tried
    choose_near(x, importances, column, d, s) -> _Chosen
        of s and its two neighbours
    """
    error_of, size, n_sets, factors = coding.error_of, search.size, search.sets, search.factors
    legal, step = _nearest_of(search.integers), np.float32(search.integers.step)
    has_zero, reach = search.integers.step == 1, np.float32(search.reach)

    @inlinable
    def untried(x: FloatTile, importances: Floats32, column: int) -> _Chosen:
        """Return the choice before anything is tried: 0 where that is an integer."""
        total = splat(ZERO)
        if has_zero:
            for i in range(size):
                total += importances[column + i] * (x[i] * x[i])
            return _Chosen(total, splat(ZERO), splat(ZERO))
        return _Chosen(total + INFINITY, splat(ONE), splat(ZERO))

    @inlinable
    def better_of(
        chosen: _Chosen, x: FloatTile, importances: Floats32, column: int, d: Floats, integer: Floats
    ) -> _Chosen:
        """Try an integer with every set, and return the better choice."""
        for number in range(n_sets):
            second = np.float32(number)
            error = error_of(x, importances, column, d * integer, second)
            better = error < chosen.error
            chosen = _Chosen(
                select(better, error, chosen.error),
                select(better, integer, chosen.integer),
                select(better, second, chosen.second),
            )
        return chosen

    @inlinable
    def choose(x: FloatTile, importances: Floats32, column: int, d: Floats) -> _Chosen:
        largest = splat(ZERO)
        for i in range(size):
            largest = maximum(largest, absolute(x[i]))
        base = largest / (reach * d)
        chosen = untried(x, importances, column)
        for k in range(2 * factors.size):
            factor = factors[k >> 1]
            integer = legal(base * (-factor if k & 1 else factor))
            chosen = better_of(chosen, x, importances, column, d, integer)
        return chosen

    @inlinable
    def choose_near(x: FloatTile, importances: Floats32, column: int, d: Floats, s: Floats) -> _Chosen:
        chosen = untried(x, importances, column)
        for k in range(-1, 2):
            chosen = better_of(chosen, x, importances, column, d, legal(s + np.float32(k) * step))
        return chosen

    return choose, choose_near


def _passes(search: ScaleTrials, coding: Coding) -> Any:
    """Return two functions of kernels that choose for all sub-blocks of a group, given d.

    try_spread(rows, column, n_subs, group, tried, sums) -> Floats, the error
        fills `tried` with integers
    choose_again(rows, column, n_subs, group, fitted, sums)
        starts from the integers in `fitted`, and replaces them

    group  d is that of weights times `power`
    sums   two Floats to be filled: the best d for what was chosen is their quotient
    """
    sums_of, size = coding.sums_of, search.size
    choose, choose_near = _choosing(search, coding)

    @inlinable
    def load_sub_block(rows: LaneRows, column: int, power: Floats, x: FloatTile) -> None:
        load_columns(rows.source, rows.importances.size, rows.first, column, size, x)
        for i in range(size):
            x[i] = x[i] * power

    @inlinable
    def add_sums(
        x: FloatTile, importances: Floats32, column: int, d: Floats, chosen: _Chosen, sums: FloatTile
    ) -> None:
        integer = chosen.integer
        sum_lx, sum_l2 = sums_of(x, importances, column, d * integer, chosen.second)
        counts = (integer != ZERO) & (d != ZERO)
        sums[0] = sums[0] + select(counts, integer * sum_lx, ZERO)
        sums[1] = sums[1] + select(counts, integer * integer * sum_l2, ZERO)

    @inlinable
    def try_spread(
        rows: LaneRows, column: int, n_subs: int, group: Group, tried: Floats32, sums: FloatTile
    ) -> Floats:
        x, total = float_tile(32), splat(ZERO)
        sums[0], sums[1] = splat(ZERO), splat(ZERO)
        for j in range(n_subs):
            start = column + size * j
            load_sub_block(rows, start, group.power, x)
            chosen = choose(x, rows.importances, start, group.d)
            store(tried, j * LANES, chosen.integer)
            total += chosen.error
            add_sums(x, rows.importances, start, group.d, chosen, sums)
        return total

    @inlinable
    def choose_again(
        rows: LaneRows, column: int, n_subs: int, group: Group, fitted: Fitted, sums: FloatTile
    ) -> None:
        x = float_tile(32)
        sums[0], sums[1] = splat(ZERO), splat(ZERO)
        for j in range(n_subs):
            start = column + size * j
            load_sub_block(rows, start, group.power, x)
            chosen = choose_near(x, rows.importances, start, group.d, load(fitted.scales, j * LANES))
            store(fitted.scales, j * LANES, chosen.integer)
            store(fitted.sets, j * LANES, chosen.second)
            add_sums(x, rows.importances, start, group.d, chosen, sums)

    return try_spread, choose_again


def fitting(search: ScaleTrials, coding: Coding) -> Any:
    """Return the function of kernels that fits the groups of LANES rows.

        fit_group(rows, column, count, fitted) -> Group

    It fills `fitted`, of at least count // size sub-blocks, with the integers and sets of those in columns
    column .. column + count - 1.
    """
    try_spread, choose_again = _passes(search, coding)
    size, n_signs, spreads, has_half = search.size, search.signs, search.spreads, search.has_half
    most = np.float32(search.reach * max(-search.integers.low, search.integers.high))

    @inlinable
    def stored(d: Floats, power: Floats) -> Floats:
        unscaled = d * inverse_of(power)
        if has_half:
            return from_half_bits(to_half_bits(unscaled))
        return unscaled

    @inlinable
    def largest_of(rows: LaneRows, column: int, n_subs: int) -> Floats:
        x, largest = float_tile(32), splat(ZERO)
        for j in range(n_subs):
            load_columns(rows.source, rows.importances.size, rows.first, column + size * j, size, x)
            for i in range(size):
                largest = maximum(largest, absolute(x[i]))
        return largest

    @inlinable
    def fit_group(rows: LaneRows, column: int, count: int, fitted: Fitted) -> Group:
        n_subs, sums = count // size, float_tile(2)
        largest = largest_of(rows, column, n_subs)
        power = power_of(largest)
        largest = largest * power

        tried = np.empty(n_subs * LANES, np.float32)
        fitted.scales[: n_subs * LANES] = ZERO
        least, best_d = splat(INFINITY), splat(ZERO)
        for trial in range(spreads.size * n_signs):
            d = largest * (spreads[trial // n_signs] / most)
            if trial % n_signs == 1:
                d = -d
            total = try_spread(rows, column, n_subs, Group(d, power), tried, sums)
            better = (total < least) & (sums[1] > ZERO)
            least = select(better, total, least)
            best_d = select(better, sums[0] / sums[1], best_d)
            for j in range(0, n_subs * LANES, LANES):
                store(fitted.scales, j, select(better, load(tried, j), load(fitted.scales, j)))

        too_large = largest != largest
        for _ in range(2):
            d = stored(best_d, power) * power
            too_large |= absolute(d) == INFINITY
            choose_again(rows, column, n_subs, Group(d, power), fitted, sums)
            best_d = select(sums[1] > ZERO, sums[0] / sums[1], ZERO)
        return Group(select(too_large, INFINITY, stored(best_d, power)), power)

    return fit_group


class SuperBlock(NamedTuple):
    """Codes of LANES rows, Ints (256), and for each sub-block its integer and its set, Ints (16)."""

    codes: IntTile
    integers: IntTile
    seconds: IntTile


def row_quantizer(
    search: ScaleTrials, coding: Coding, type_: GGMLType
) -> Callable[[Callable[..., None]], Callable[..., int]]:
    """Return the decorator that makes the kernel of `rows.encode_scaled_rows` of a function pack_block.

        pack_block(codes, integers, seconds, words)

    It fills `words` with a super-block. The kernel encodes rows, each with a scale of its own.
    """
    fit_group, code_super_block = fitting(search, coding), _super_block_coder(search, coding)
    block_bytes, meta_bytes = type_.block_bytes, type_.row_meta_bytes
    n_words, size = padded_words(block_bytes), search.size

    def made_of(pack_block: Callable[..., None]) -> Callable[..., int]:
        pack = inlinable(pack_block)

        def quantize_rows(source: Floats32, importances: Floats32, scales: Floats32, out: Bytes) -> int:
            n_cols, n_rows = importances.size, scales.size
            block = SuperBlock(int_tile(SUPER_ELEMS), int_tile(16), int_tile(16))
            words = int_tile(n_words)
            n_fitted = n_cols // size * LANES
            fitted = Fitted(np.empty(n_fitted, np.float32), np.empty(n_fitted, np.float32))
            of_rows = np.empty(LANES, np.float32)
            for first in range(0, n_rows, LANES):
                rows = LaneRows(source, importances, first)
                group = fit_group(rows, 0, n_cols, fitted)
                failure = first_infinite(group.d, first)
                if failure >= 0:
                    return failure
                store(of_rows, 0, group.d)
                for row in range(first, min(first + LANES, n_rows)):
                    scales[row] = of_rows[row - first]
                for k in range(n_cols // SUPER_ELEMS):
                    column = k * SUPER_ELEMS
                    code_super_block(rows, column, group, fitted, column // size, block)
                    pack(block.codes, block.integers, block.seconds, words)
                    store_in_rows(words, block_bytes, meta_bytes + k * block_bytes, first, out, n_rows)
            return -1

        return kernel_of(pack_block, quantize_rows)

    return made_of


def block_quantizer(
    search: ScaleTrials, coding: Coding, type_: GGMLType
) -> Callable[[Callable[..., None]], Callable[..., int]]:
    """Return the decorator that makes the kernel of `rows.encode_rows` of a function pack_block.

        pack_block(half_d, codes, integers, seconds, words)

    It fills `words` with a super-block. The kernel encodes super-blocks, each with a float16 of its own.
    """
    fit_group, code_super_block = fitting(search, coding), _super_block_coder(search, coding)
    block_bytes, n_fitted = type_.block_bytes, SUPER_ELEMS // search.size * LANES
    n_words = padded_words(block_bytes)

    def made_of(pack_block: Callable[..., None]) -> Callable[..., int]:
        pack = inlinable(pack_block)

        def quantize_blocks(source: Floats32, importances: Floats32, out: Bytes) -> int:
            n_cols = importances.size
            n_rows = source.size // n_cols
            block = SuperBlock(int_tile(SUPER_ELEMS), int_tile(16), int_tile(16))
            words = int_tile(n_words)
            fitted = Fitted(np.empty(n_fitted, np.float32), np.empty(n_fitted, np.float32))
            for first in range(0, n_rows, LANES):
                rows = LaneRows(source, importances, first)
                for k in range(n_cols // SUPER_ELEMS):
                    column = k * SUPER_ELEMS
                    group = fit_group(rows, column, SUPER_ELEMS, fitted)
                    failure = first_infinite(group.d, first)
                    if failure >= 0:
                        return failure
                    code_super_block(rows, column, group, fitted, 0, block)
                    pack(to_half_bits(group.d), block.codes, block.integers, block.seconds, words)
                    store_in_rows(words, block_bytes, k * block_bytes, first, out, n_rows)
            return -1

        return kernel_of(pack_block, quantize_blocks)

    return made_of


def _super_block_coder(search: ScaleTrials, coding: Coding) -> Any:
    """Return the function of kernels that codes one super-block of LANES rows.

        code_super_block(rows, column, group, fitted, sub, block)

    It fills `block`.

    column         where the super-block begins
    group, fitted  what `fit_group` returned and filled for the group that it is in
    sub            number of the super-block's first sub-block in that group
    """
    codes_of, size = coding.codes_of, search.size

    @inlinable
    def code_super_block(
        rows: LaneRows, column: int, group: Group, fitted: Fitted, sub: int, block: SuperBlock
    ) -> None:
        x, importances = float_tile(32), rows.importances
        d = group.d * group.power
        for j in range(SUPER_ELEMS // size):
            start = column + size * j
            load_columns(rows.source, importances.size, rows.first, start, size, x)
            for i in range(size):
                x[i] = x[i] * group.power
            at = (sub + j) * LANES
            integer, second = load(fitted.scales, at), load(fitted.sets, at)
            codes_of(x, importances, start, d * integer, second, tail(block.codes, size * j))
            block.integers[j] = to_int(integer)
            block.seconds[j] = to_int(second)

    return code_super_block


@inlinable
def in_order(values: IntTile, first: int, count: int, shift: int, bits: int) -> Ints:
    """Return bits shift .. shift + bits - 1 of values first .. first + count - 1, the first one lowest."""
    word = splat(0)
    for i in range(count):
        word |= (values[first + i] >> shift & (1 << bits) - 1) << bits * i
    return word
