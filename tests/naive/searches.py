"""The searches for a scale (and a minimum) that the formats share, number by number.

A search gets the values x and the weights w of one block and returns what to store; the error it minimises is
sum(w * (decoded - x)**2). Sums run in index order, products left to right.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from tests.naive.floats import clamp, f32, nearest

TINY = f32(1e-15)
"""A block whose largest magnitude is smaller counts as zero."""

Numbers = Sequence[f32] | npt.NDArray[np.float32]


def largest_magnitude(x: Numbers) -> f32:
    """Return the first of the values with the largest magnitude, with its sign; 0 if all are 0."""
    best = f32(0)
    for value in x:
        if abs(value) > abs(best):
            best = value
    return best


def signed_scale(x: Numbers, w: Numbers, half: int) -> tuple[f32, list[int]]:
    """Return (scale, codes 0..2*half-1) so that x is about scale * (code - half).

    The first guess maps the largest magnitude to -half; 18 more inverse scales around it are tried. For
    given codes l the best scale is sum(w*x*l) / sum(w*l*l), and it lowers the error by sum(w*x*l)**2 /
    sum(w*l*l): the trial with the largest gain wins, the earliest of equals.
    """
    peak = largest_magnitude(x)
    if abs(peak) < TINY:
        return f32(0), [0] * len(x)

    def trial(inverse: f32) -> tuple[list[int], f32, f32]:
        codes = [clamp(nearest(inverse * value), -half, half - 1) for value in x]
        sum_xl = sum_ll = f32(0)
        for value, weight, code in zip(x, w, codes, strict=True):
            sum_xl += weight * value * code
            sum_ll += weight * code * code
        return codes, sum_xl, sum_ll

    best_codes, sum_xl, sum_ll = trial(f32(-half) / peak)
    scale = sum_xl / sum_ll if sum_ll != 0 else f32(0)
    gain = scale * sum_xl
    for step in range(-9, 10):
        if step == 0:
            continue
        codes, sum_xl, sum_ll = trial(-(f32(0.1) * step + half) / peak)
        if sum_ll > 0 and sum_xl * sum_xl > gain * sum_ll:
            best_codes = codes
            scale = sum_xl / sum_ll
            gain = scale * sum_xl
    return scale, [code + half for code in best_codes]


def signed_scale_by_moves(x: Numbers, half: int) -> tuple[f32, list[int]]:
    """Return (scale, codes 0..2*half-1) as `signed_scale`, with weights x**2 and another way to search.

    From the first guess, up to 5 rounds visit each value and move its code to where the others want it,
    if the gain sum(w*x*l)**2 / sum(w*l*l) grows.
    """
    peak = largest_magnitude(x)
    if abs(peak) < TINY:
        return f32(0), [0] * len(x)
    inverse = f32(-half) / peak
    codes = [clamp(nearest(inverse * value), -half, half - 1) for value in x]
    sum_xl = sum_ll = f32(0)
    for value, code in zip(x, codes, strict=True):
        weight = value * value
        sum_xl += weight * value * code
        sum_ll += weight * code * code
    for _ in range(5):
        moved = False
        for i, value in enumerate(x):
            weight = value * value
            other_xl = sum_xl - weight * value * codes[i]
            if not other_xl > 0:
                continue
            other_ll = sum_ll - weight * codes[i] * codes[i]
            code = clamp(nearest(value * other_ll / other_xl), -half, half - 1)
            if code == codes[i]:
                continue
            other_xl += weight * value * code
            other_ll += weight * code * code
            if other_ll > 0 and other_xl * other_xl * sum_ll > sum_xl * sum_xl * other_ll:
                codes[i], sum_xl, sum_ll = code, other_xl, other_ll
                moved = True
        if not moved:
            break
    return (sum_xl / sum_ll if sum_ll > 0 else f32(0)), [code + half for code in codes]


def scale_and_minimum(
    x: Numbers, w: Numbers, top: int, first: float, step: float, n_steps: int, *, absolute: bool = False
) -> tuple[f32, f32, list[int]]:
    """Return (scale, offset, codes 0..top) so that x is about scale * code - offset, offset >= 0.

    The first guess spans the values, 0 included. Then n_steps + 1 wider or narrower inverse scales give
    codes, the codes give the best scale and minimum by weighted least squares (the minimum held at 0 if
    it would be positive), and the trial with the smallest error wins. The minimum of a winner shifts the
    codes of the trials after it.

    absolute  the error of a value counts as |decoded - x| instead of its square
    """
    low = high = x[0]
    sum_w = w[0]
    sum_x = sum_w * x[0]
    for value, weight in zip(x[1:], w[1:], strict=True):
        low = value if value < low else low
        high = value if value > high else high
        sum_w += weight
        sum_x += weight * value
    low = min(low, f32(0))
    if high == low:
        return f32(0), -low, [0] * len(x)
    spread = high - low

    def codes_for(inverse: f32, minimum: f32) -> list[int]:
        return [clamp(nearest(inverse * (value - minimum)), 0, top) for value in x]

    def error_of(scale: f32, minimum: f32, codes: list[int]) -> f32:
        total = f32(0)
        for value, weight, code in zip(x, w, codes, strict=True):
            difference = scale * code + minimum - value
            total += weight * (abs(difference) if absolute else difference * difference)
        return total

    minimum = low
    inverse = f32(top) / spread
    scale = 1 / inverse
    best_codes = codes_for(inverse, minimum)
    best_error = error_of(scale, minimum, best_codes)
    for trial in range(n_steps + 1):
        # the spread of the *current* minimum, which a winning trial has replaced
        inverse = (f32(first) + f32(step) * trial + top) / (high - minimum)
        codes = codes_for(inverse, minimum)
        sum_l = sum_ll = sum_xl = f32(0)
        for value, weight, code in zip(x, w, codes, strict=True):
            sum_l += weight * code
            sum_ll += weight * code * code
            sum_xl += weight * code * value
        determinant = sum_w * sum_ll - sum_l * sum_l
        if not determinant > 0:
            continue
        trial_scale = (sum_w * sum_xl - sum_x * sum_l) / determinant
        trial_minimum = (sum_ll * sum_x - sum_l * sum_xl) / determinant
        if trial_minimum > 0:
            trial_minimum = f32(0)
            trial_scale = sum_xl / sum_ll
        error = error_of(trial_scale, trial_minimum, codes)
        if error < best_error:
            best_codes, best_error, scale, minimum = codes, error, trial_scale, trial_minimum
    return scale, -minimum, best_codes


def positive_scale(x: Numbers, w: Numbers, top: int) -> tuple[f32, list[int]]:
    """Return (scale, codes 0..top) so that the values x >= 0 are about scale * code.

    Nine inverse scales compete by squared error; the winner's codes are then moved one by one as in
    `signed_scale_by_moves`. Codes are kept in a byte: a negative one wraps.
    """
    peak = f32(0)
    for value in x:
        peak = value if value > peak else peak
    if peak < TINY:
        return f32(0), [0] * len(x)

    def error_of(scale: f32, codes: list[int]) -> f32:
        total = f32(0)
        for value, weight, code in zip(x, w, codes, strict=True):
            difference = value - scale * code
            total += weight * difference * difference
        return total

    inverse = f32(top) / peak
    best_error = error_of(1 / inverse, [nearest(inverse * value) & 0xFF for value in x])
    for step in range(-4, 5):
        if step == 0:
            continue
        trial = (f32(0.1) * step + top) / peak
        error = error_of(1 / trial, [min(top, nearest(trial * value)) for value in x])
        if error < best_error:
            best_error, inverse = error, trial

    codes = []
    sum_xl = sum_ll = f32(0)
    for value, weight in zip(x, w, strict=True):
        code = min(top, nearest(inverse * value))
        codes.append(code & 0xFF)
        sum_xl += weight * value * code
        sum_ll += weight * code * code
    for _ in range(5):
        moved = False
        for i, (value, weight) in enumerate(zip(x, w, strict=True)):
            other_xl = sum_xl - weight * value * codes[i]
            other_ll = sum_ll - weight * codes[i] * codes[i]
            if not (other_xl > 0 and other_ll > 0):
                continue
            code = min(top, nearest(value * other_ll / other_xl))
            if code == codes[i]:
                continue
            other_xl += weight * value * code
            other_ll += weight * code * code
            if other_xl * other_xl * sum_ll > sum_xl * sum_xl * other_ll:
                codes[i], sum_xl, sum_ll = code & 0xFF, other_xl, other_ll
                moved = True
        if not moved:
            break
    return (sum_xl / sum_ll if sum_ll > 0 else f32(0)), codes


def total(values: Numbers) -> f32:
    """Return the sum in index order."""
    result = f32(0)
    for value in values:
        result += value
    return result


def sum_of_squares(x: Numbers) -> f32:
    return total([value * value for value in x])


def importance_weights(x: Numbers, importances: Numbers, mean_square: f32) -> list[f32]:
    """Return importance * sqrt(mean_square + x**2): small values count, by their neighbours' size."""
    return [
        importance * np.sqrt(mean_square + value * value)
        for value, importance in zip(x, importances, strict=True)
    ]
