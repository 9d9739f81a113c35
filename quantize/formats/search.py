"""The searches that formats share, for the scale, and sometimes the minimum, that code a sub-block best.

Each works on LANES sub-blocks at once and takes the reference's steps in its order: which candidate wins
a tie, which sums run in which order, what is updated inside a loop. The docstrings name ggml's functions.

A search does not return its codes, it returns what rebuilds them: the inverse scale (and the minimum) that
made the winning codes. They are needed only where the stored scale turns out to be 0: the reference then
leaves the codes of the search in place.

A search that comes in two flavours is made by a factory that takes the function in which they differ. (The
search itself could take it as an argument, but numba can't cache a kernel that passes a function.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from quantize.simd.floats import IN_RANGE, MAGIC, ONE, ZERO, clamp, nearest_float, nearest_int
from quantize.simd.kernel import inlinable
from quantize.simd.lane_memory import FloatTile, IntTile, tile_like, zero_like
from quantize.simd.lanes import (
    Floats,
    Mask,
    absolute,
    all_lanes,
    any_lane,
    maximum,
    minimum,
    select,
    to_float,
)

EMPTY = np.float32(1e-15)  # ggml's GROUP_MAX_EPS: below it a group counts as all zero


class _Sums(NamedTuple):
    """Of a sub-block: its least and its largest x, the sums of weights and of weight * x."""

    lowest: Floats
    highest: Floats
    weights: Floats
    products: Floats


@inlinable
def _sums_of(x: FloatTile, weights: FloatTile, size: int) -> _Sums:
    lowest = x[0]
    highest = x[0]
    sum_w = weights[0]
    sum_wx = sum_w * x[0]
    for i in range(1, size):
        lowest = minimum(x[i], lowest)
        highest = maximum(x[i], highest)
        sum_w += weights[i]
        sum_wx += weights[i] * x[i]
    return _Sums(lowest, highest, sum_w, sum_wx)


@inlinable
def _affine_levels(
    x: FloatTile, inverse: Floats, low: Floats, sums: _Sums, size: int, top: int, levels: FloatTile
) -> None:
    """Fill `levels`, Floats, with the codes of x under an inverse scale and a minimum.

    Rounding is monotone, so if the bounds of x stay in the range where the cheap rounding is the reference's,
    all of x does. They leave it where a fit has made highest - low tiny or zero.
    """
    in_range = absolute(inverse * (sums.lowest - low)) < IN_RANGE
    in_range &= absolute(inverse * (sums.highest - low)) < IN_RANGE
    if all_lanes(in_range):
        for i in range(size):
            levels[i] = nearest_float(inverse * (x[i] - low), 0, top)
    else:
        for i in range(size):
            levels[i] = to_float(clamp(nearest_int(inverse * (x[i] - low)), 0, top))


class _Line(NamedTuple):
    """The least squares fit x ~ scale * level + low, low at most 0; it means nothing without `exists`."""

    scale: Floats
    low: Floats
    exists: Mask


@inlinable
def _fitted_line(x: FloatTile, weights: FloatTile, levels: FloatTile, sums: _Sums, size: int) -> _Line:
    sum_l = zero_like(x)
    sum_l2 = zero_like(x)
    sum_lx = zero_like(x)
    for i in range(size):
        weighted = weights[i] * levels[i]
        sum_l += weighted
        sum_l2 += weighted * levels[i]
        sum_lx += weighted * x[i]
    determinant = sums.weights * sum_l2 - sum_l * sum_l
    scale = (sums.weights * sum_lx - sums.products * sum_l) / determinant
    low = (sum_l2 * sums.products - sum_l * sum_lx) / determinant
    above = low > ZERO
    return _Line(select(above, sum_lx / sum_l2, scale), select(above, ZERO, low), determinant > ZERO)


def _affine_search(measure: Callable[..., Any]) -> Any:
    """Return the search for scale and minimum, given what an error costs.

        search(x, weights, size, top, first, step, steps) -> scale, minus_low, inverse, code_low

    so that x ~ scale * code - minus_low, code in 0 .. top, for size <= 32 elements. make_qkx2_quants and
    make_qkx3_quants: the candidates for the inverse scale are (top + first + step * k) / range, k = 0 ..
    steps; the codes of each get a weighted least squares fit. The winner's minimum is also where the range
    of the next candidates begins.
    """

    @inlinable
    def error_of(
        x: FloatTile, weights: FloatTile, levels: FloatTile, scale: Floats, low: Floats, size: int
    ) -> Floats:
        total = zero_like(x)
        for i in range(size):
            total += weights[i] * measure(scale * levels[i] + low - x[i])
        return total

    @inlinable
    def search(
        x: FloatTile, weights: FloatTile, size: int, top: int, first: np.float32, step: np.float32, steps: int
    ) -> tuple[Floats, Floats, Floats, Floats]:
        levels = tile_like(x, 32)
        sums = _sums_of(x, weights, size)
        low = select(sums.lowest > ZERO, ZERO, sums.lowest)
        flat = sums.highest <= low

        code_low = low
        inverse = np.float32(top) / select(flat, ONE, sums.highest - low)
        scale = ONE / inverse
        _affine_levels(x, inverse, low, sums, size, top, levels)
        best = error_of(x, weights, levels, scale, low, size)

        for k in range(steps + 1):
            spread = select(flat, ONE, sums.highest - low)
            candidate = (first + step * np.float32(k) + np.float32(top)) / spread
            _affine_levels(x, candidate, low, sums, size, top, levels)
            line = _fitted_line(x, weights, levels, sums, size)
            total = error_of(x, weights, levels, line.scale, line.low, size)
            better = line.exists & (total < best) & ~flat
            best = select(better, total, best)
            inverse = select(better, candidate, inverse)
            code_low = select(better, low, code_low)
            scale = select(better, line.scale, scale)
            low = select(better, line.low, low)

        return select(flat, ZERO, scale), -low, select(flat, ZERO, inverse), code_low

    return search


@inlinable
def _squared(error: Floats) -> Floats:
    return error * error


search_affine = _affine_search(_squared)
search_affine_absolute = _affine_search(absolute)


@inlinable
def affine_codes(
    x: FloatTile,
    scale: Floats,
    minus_low: Floats,
    inverse: Floats,
    code_low: Floats,
    size: int,
    top: int,
    codes: IntTile,
) -> None:
    """Fill `codes`, Ints, for the scale and minimum as stored; where that scale is 0, with the search's."""
    for i in range(size):
        codes[i] = clamp(nearest_int((x[i] + minus_low) / scale), 0, top)
    kept = scale == ZERO
    if any_lane(kept):
        for i in range(size):
            searched = clamp(nearest_int(inverse * (x[i] - code_low)), 0, top)
            codes[i] = select(kept, searched, codes[i])


@inlinable
def farthest_from_zero(x: FloatTile, count: int) -> tuple[Floats, Floats]:
    """Return the largest |x[j]|, and the x[j] that has it; the first one of equals. NaN never counts."""
    largest = zero_like(x)
    extreme = zero_like(x)
    for j in range(count):
        farther = absolute(x[j]) > largest
        largest = select(farther, absolute(x[j]), largest)
        extreme = select(farther, x[j], extreme)
    return largest, extreme


class _Found(NamedTuple):
    """The best so far: scale, how much it gains, and the inverse scale that made its codes."""

    scale: Floats
    gain: Floats
    inverse: Floats


@inlinable
def _better_of(inverse: Floats, sum_lx: Floats, sum_l2: Floats, found: _Found) -> _Found:
    """Return the better of a candidate, judged by its sums, and what was found before."""
    better = (sum_l2 > ZERO) & (sum_lx * sum_lx > found.gain * sum_l2)
    scale = select(better, sum_lx / sum_l2, found.scale)
    return _Found(scale, select(better, scale * sum_lx, found.gain), select(better, inverse, found.inverse))


def _trial(level: Callable[..., Any]) -> Any:
    """Return the trial of some candidates, given how values become levels, -half .. half - 1.

        trial(x, weights, weighted, extreme, size, half, pairs, found) -> found

    A candidate is judged by the sums of weight * level * x and weight * level**2; `weighted` are the products
    weight * x. Two at a time: one alone leaves the processor waiting for its sums. Pairs 0 .. 8 of candidates
    have k = -9, -8; ... -3, -2; -1, 1; 2, 3; ... 8, 9.
    """

    @inlinable
    def trial(
        x: FloatTile,
        weights: FloatTile,
        weighted: FloatTile,
        extreme: Floats,
        size: int,
        half: int,
        pairs: tuple[int, int],
        found: _Found,
    ) -> _Found:
        for pair in range(pairs[0], pairs[1]):
            first_k, second_k = 2 * pair - 9 + (pair > 4), 2 * pair - 8 + (pair > 3)
            first = -(np.float32(half) + np.float32(0.1) * np.float32(first_k)) / extreme
            second = -(np.float32(half) + np.float32(0.1) * np.float32(second_k)) / extreme
            first_lx = zero_like(x)
            first_l2 = zero_like(x)
            second_lx = zero_like(x)
            second_l2 = zero_like(x)
            for i in range(size):
                one, other = level(first * x[i], half), level(second * x[i], half)
                first_lx += weighted[i] * one
                first_l2 += weights[i] * one * one
                second_lx += weighted[i] * other
                second_l2 += weights[i] * other * other
            found = _better_of(first, first_lx, first_l2, found)
            found = _better_of(second, second_lx, second_l2, found)
        return found

    return trial


def _symmetric_search(
    level_within: Callable[..., Any], level_above: Callable[..., Any], level: Callable[..., Any]
) -> Any:
    """Return the search for a scale, given how values are rounded and limited to -half .. half - 1.

        search(x, weights, size, half) -> scale, inverse

    so that x ~ scale * (code - half), code in 0 .. 2 * half - 1, for size <= 32 elements. make_qx_quants with
    weights: candidates for the inverse scale are -(half + k / 10) / extreme, where extreme is the x farthest
    from zero, k first 0, then -9 .. 9. Where all of x counts as zero, scale and inverse are 0.

    level_within  for values that are rounded to levels in the limits, as all are for k <= -6
    level_above   for values that are not rounded to levels below them, as none is for k <= 4
    level         for any values
    """
    trial_within, trial_above, trial = _trial(level_within), _trial(level_above), _trial(level)

    @inlinable
    def search(x: FloatTile, weights: FloatTile, size: int, half: int) -> tuple[Floats, Floats]:
        weighted = tile_like(x, 32)
        for i in range(size):
            weighted[i] = weights[i] * x[i]
        largest, extreme = farthest_from_zero(x, size)
        empty = largest < EMPTY

        inverse = np.float32(-half) / extreme
        sum_lx = zero_like(x)
        sum_l2 = zero_like(x)
        for i in range(size):
            rounded = level_above(inverse * x[i], half)
            sum_lx += weighted[i] * rounded
            sum_l2 += weights[i] * rounded * rounded
        scale = select(sum_l2 != ZERO, sum_lx / sum_l2, ZERO)
        found = _Found(scale, scale * sum_lx, inverse)
        found = trial_within(x, weights, weighted, extreme, size, half, (0, 2), found)
        found = trial_above(x, weights, weighted, extreme, size, half, (2, 6), found)
        found = trial(x, weights, weighted, extreme, size, half, (6, 9), found)
        return select(empty, ZERO, found.scale), select(empty, ZERO, found.inverse)

    return search


@inlinable
def _level_within(value: Floats, half: int) -> Floats:
    return (value + MAGIC) - MAGIC


@inlinable
def _level_above(value: Floats, half: int) -> Floats:
    return minimum(value + MAGIC, MAGIC + np.float32(half - 1)) - MAGIC


@inlinable
def _level(value: Floats, half: int) -> Floats:
    return nearest_float(value, -half, half - 1)


@inlinable
def _level_of_any(value: Floats, half: int) -> Floats:
    return to_float(clamp(nearest_int(value), -half, half - 1))


search_symmetric = _symmetric_search(_level_within, _level_above, _level)
"""The search for finite x."""
search_symmetric_of_any = _symmetric_search(_level_of_any, _level_of_any, _level_of_any)
"""The search for x that may be NaN or infinite, so that `extreme` does not bound them."""


@inlinable
def symmetric_codes(
    x: FloatTile, scale: Floats, inverse: Floats, size: int, half: int, codes: IntTile
) -> None:
    """Fill `codes`, Ints, for the scale as stored; where that is 0, with those of `search_symmetric`."""
    for i in range(size):
        codes[i] = clamp(nearest_int(x[i] / scale), -half, half - 1) + half
    kept = scale == ZERO
    if any_lane(kept):
        for i in range(size):
            searched = clamp(nearest_int(inverse * x[i]), -half, half - 1) + half
            codes[i] = select(kept, select(inverse == ZERO, 0, searched), codes[i])


@inlinable
def search_positive(x: FloatTile, weights: FloatTile, codes: IntTile, size: int, top: int) -> Floats:
    """Return the scale with x ~ scale * code and fill `codes`, Ints; x are scales or minimums themselves.

    make_qp_quants: nine candidates, then up to five rounds that move one code at a time. Codes are bytes
    without a lower bound there: that of a negative x wraps around.
    """
    largest = zero_like(x)
    for i in range(size):
        largest = maximum(largest, x[i])
    empty = largest < EMPTY

    inverse = np.float32(top) / largest
    scale = ONE / inverse
    best = zero_like(x)
    for i in range(size):
        error = x[i] - scale * to_float(nearest_int(inverse * x[i]) & 0xFF)
        best += weights[i] * error * error
    for k in range(-4, 5):
        if k != 0:
            candidate = (np.float32(0.1) * np.float32(k) + np.float32(top)) / largest
            scale = ONE / candidate
            total = zero_like(x)
            for i in range(size):
                error = x[i] - scale * to_float(minimum(nearest_int(candidate * x[i]), top))
                total += weights[i] * error * error
            better = total < best
            best = select(better, total, best)
            inverse = select(better, candidate, inverse)

    sum_lx = zero_like(x)
    sum_l2 = zero_like(x)
    for i in range(size):
        code = minimum(nearest_int(inverse * x[i]), top)
        codes[i] = code & 0xFF
        sum_lx += weights[i] * x[i] * to_float(code)
        sum_l2 += weights[i] * to_float(code) * to_float(code)
    for _ in range(5):
        changed = empty & ~empty
        for i in range(size):
            old = to_float(codes[i])
            rest_lx = sum_lx - weights[i] * x[i] * old
            rest_l2 = sum_l2 - weights[i] * old * old
            code = minimum(nearest_int(x[i] * rest_l2 / rest_lx), top)
            moves = (rest_lx > ZERO) & (rest_l2 > ZERO) & (code != codes[i])
            if any_lane(moves):  # seldom: as the sums stay, elements need not wait for one another
                new = to_float(code)
                new_lx = rest_lx + weights[i] * x[i] * new
                new_l2 = rest_l2 + weights[i] * new * new
                better = moves & (new_lx * new_lx * sum_l2 > sum_lx * sum_lx * new_l2)
                codes[i] = select(better, code & 0xFF, codes[i])
                sum_lx = select(better, new_lx, sum_lx)
                sum_l2 = select(better, new_l2, sum_l2)
                changed |= better
        if not any_lane(changed):
            break

    for i in range(size):
        codes[i] = select(empty, 0, codes[i])
    return select(empty | ~(sum_l2 > ZERO), ZERO, sum_lx / sum_l2)
