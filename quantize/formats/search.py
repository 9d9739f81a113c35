"""The searches that K-quants share: which scale (and minimum) codes a sub-block best.

Each works on LANES sub-blocks at once, from Tiles, and takes the reference's steps in its order: what it
updates inside a loop, which candidate wins a tie, which sums are in which order. The names say which of
ggml's functions they match.

A search returns the numbers that rebuild its codes instead of the codes: `level_*` are the inverse scale and
the minimum in use when the winning codes were made, which the winning scale and minimum replace.
"""

from __future__ import annotations

import numpy as np

from quantize.formats.kernel import part
from quantize.formats.lane_memory import Tile
from quantize.formats.lanes import Floats, Ints, any_lane, maximum, minimum, select, splat, to_float
from quantize.formats.rounding import clamp, nearest_int

ZERO = np.float32(0)
ONE = np.float32(1)
EMPTY = np.float32(1e-15)  # ggml's GROUP_MAX_EPS: below it a group counts as all zero


@part
def affine_level(x: Floats, inverse_scale: Floats, low: Floats, top: int) -> Ints:
    """Return the codes 0 .. top of x with x ~ low + code / inverse_scale."""
    return clamp(nearest_int(inverse_scale * (x - low)), 0, top)


@part
def search_affine(
    x: Tile, weights: Tile, size: int, top: int, first: np.float32, step: np.float32, steps: int
) -> tuple[Floats, Floats, Floats, Floats]:
    """Return scale, minimum, level_inverse, level_minimum with x ~ minimum + scale * code, code 0 .. top.

    Matches make_qkx2_quants and make_qkx3_quants with squared errors: candidates of the inverse scale are
    (top + first + k * step) / range for k = 0 .. steps, each followed by a weighted least squares fit.
    """
    low = x[0]
    high = x[0]
    sum_w = weights[0]
    sum_wx = sum_w * x[0]
    for i in range(1, size):
        low = minimum(x[i], low)
        high = maximum(x[i], high)
        sum_w += weights[i]
        sum_wx += weights[i] * x[i]
    low = select(low > ZERO, ZERO, low)
    flat = high <= low
    flat_low = low

    level_inverse = np.float32(top) / (high - low)
    level_low = low
    scale = ONE / level_inverse
    best = splat(ZERO)
    for i in range(size):
        level = to_float(affine_level(x[i], level_inverse, low, top))
        error = scale * level + low - x[i]
        best += weights[i] * (error * error)

    for k in range(steps + 1):
        inverse = (first + step * np.float32(k) + np.float32(top)) / (high - low)
        sum_l = splat(ZERO)
        sum_l2 = splat(ZERO)
        sum_lx = splat(ZERO)
        for i in range(size):
            level = to_float(affine_level(x[i], inverse, low, top))
            wl = weights[i] * level
            sum_l += wl
            sum_l2 += wl * level
            sum_lx += wl * x[i]
        determinant = sum_w * sum_l2 - sum_l * sum_l
        fit_scale = (sum_w * sum_lx - sum_wx * sum_l) / determinant
        fit_low = (sum_l2 * sum_wx - sum_l * sum_lx) / determinant
        above = fit_low > ZERO
        fit_scale = select(above, sum_lx / sum_l2, fit_scale)
        fit_low = select(above, ZERO, fit_low)
        total = splat(ZERO)
        for i in range(size):
            level = to_float(affine_level(x[i], inverse, low, top))
            error = fit_scale * level + fit_low - x[i]
            total += weights[i] * (error * error)
        better = (determinant > ZERO) & (total < best)
        best = select(better, total, best)
        level_inverse = select(better, inverse, level_inverse)
        level_low = select(better, low, level_low)
        scale = select(better, fit_scale, scale)
        low = select(better, fit_low, low)

    scale = select(flat, ZERO, scale)
    low = select(flat, flat_low, low)
    return scale, low, select(flat, ZERO, level_inverse), select(flat, ZERO, level_low)


@part
def affine_codes(
    x: Tile,
    scale: Floats,
    minus_low: Floats,
    level_inverse: Floats,
    level_low: Floats,
    size: int,
    top: int,
    codes: Tile,
) -> None:
    """Fill `codes` for the scale and minimum that were stored; where that scale is 0, those of the search."""
    for i in range(size):
        codes[i] = clamp(nearest_int((x[i] + minus_low) / scale), 0, top)
    kept = scale == ZERO
    if any_lane(kept):
        for i in range(size):
            codes[i] = select(kept, affine_level(x[i], level_inverse, level_low, top), codes[i])


@part
def search_positive(x: Tile, weights: Tile, levels: Tile, size: int, top: int) -> Floats:
    """Return the scale with x ~ scale * levels, and fill `levels`, Ints 0 .. top; x are themselves scales.

    Matches make_qp_quants: nine candidates, then up to five rounds that move one level at a time. It keeps
    levels in bytes without a lower bound, so that the level of a negative x wraps around.
    """
    largest = splat(ZERO)
    for i in range(size):
        largest = maximum(largest, x[i])
    empty = largest < EMPTY

    inverse = np.float32(top) / largest
    scale = ONE / inverse
    best = splat(ZERO)
    for i in range(size):
        error = x[i] - scale * to_float(nearest_int(inverse * x[i]) & 0xFF)
        best += weights[i] * error * error
    for k in range(-4, 5):
        if k != 0:
            candidate = (np.float32(0.1) * np.float32(k) + np.float32(top)) / largest
            scale = ONE / candidate
            total = splat(ZERO)
            for i in range(size):
                error = x[i] - scale * to_float(minimum(nearest_int(candidate * x[i]), top))
                total += weights[i] * error * error
            better = total < best
            best = select(better, total, best)
            inverse = select(better, candidate, inverse)

    sum_lx = splat(ZERO)
    sum_l2 = splat(ZERO)
    for i in range(size):
        level = minimum(nearest_int(inverse * x[i]), top)
        levels[i] = level & 0xFF
        sum_lx += weights[i] * x[i] * to_float(level)
        sum_l2 += weights[i] * to_float(level) * to_float(level)
    for _ in range(5):
        changed = empty & ~empty
        for i in range(size):
            old = to_float(levels[i])
            rest_lx = sum_lx - weights[i] * x[i] * old
            rest_l2 = sum_l2 - weights[i] * old * old
            level = minimum(nearest_int(x[i] * rest_l2 / rest_lx), top)
            new = to_float(level)
            new_lx = rest_lx + weights[i] * x[i] * new
            new_l2 = rest_l2 + weights[i] * new * new
            better = new_lx * new_lx * sum_l2 > sum_lx * sum_lx * new_l2
            better &= (rest_lx > ZERO) & (rest_l2 > ZERO) & (level != levels[i])
            levels[i] = select(better, level & 0xFF, levels[i])
            sum_lx = select(better, new_lx, sum_lx)
            sum_l2 = select(better, new_l2, sum_l2)
            changed |= better
        if not any_lane(changed):
            break

    for i in range(size):
        levels[i] = select(empty, 0, levels[i])
    return select(empty | ~(sum_l2 > ZERO), ZERO, sum_lx / sum_l2)
