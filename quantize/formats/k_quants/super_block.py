"""Steps that K-quants share around their searches: weights of errors, fits of sub-blocks, codes of scales.

A super-block is 256 weights in sub-blocks of 16 or 32. Each sub-block has a scale, and in Q2_K, Q4_K and
Q5_K a minimum; these are in turn coded with one float16 per super-block.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from quantize.formats.search import affine_codes, search_affine, search_affine_absolute, search_symmetric
from quantize.simd.floats import ZERO, from_half_bits, nearest_int
from quantize.simd.kernel import inlinable
from quantize.simd.lane_memory import FloatTile, IntTile, beside, tail
from quantize.simd.lanes import (
    Floats,
    absolute,
    maximum,
    select,
    shift_right_logical,
    splat,
    square_root,
    to_float,
)
from quantize.simd.packing import unpack_scale

ELEMS = 256


class AffineFit(NamedTuple):
    """Result of `search_affine` for each sub-block: Tiles of Floats, one vector per sub-block."""

    scales: FloatTile
    minus_lows: FloatTile
    inverses: FloatTile
    code_lows: FloatTile


@inlinable
def mean_square(x: FloatTile, factor: np.float32) -> Floats:
    """Return factor times the mean of the squares of a super-block."""
    total = splat(ZERO)
    for i in range(ELEMS):
        total += x[i] * x[i]
    return factor * total / np.float32(ELEMS)


@inlinable
def weigh(x: FloatTile, weights: FloatTile, spread: Floats, size: int, sums: FloatTile) -> None:
    """Turn importances into the weights of errors, in place, and fill `sums` with their sum per sub-block.

    A weight grows with the element itself: importance * sqrt(spread + x**2).
    """
    for j in range(ELEMS // size):
        total = splat(ZERO)
        for i in range(j * size, (j + 1) * size):
            weights[i] = weights[i] * square_root(spread + x[i] * x[i])
            total += weights[i]
        sums[j] = total


@inlinable
def weigh_by_magnitude(x: FloatTile, size: int, weights: FloatTile) -> None:
    """Fill `weights` with |x| plus the sub-block's root mean square, where there are no importances."""
    for j in range(ELEMS // size):
        total = splat(ZERO)
        for i in range(j * size, (j + 1) * size):
            total += x[i] * x[i]
        typical = square_root(total / np.float32(size))
        for i in range(j * size, (j + 1) * size):
            weights[i] = typical + absolute(x[i])


def _fit_with(search: Callable[..., Any]) -> Any:
    """Return the function that fills an AffineFit by a search of each sub-block.

    fit_sub_blocks(x, weights, size, top, first, step, steps, fit)

    Two sub-blocks at a time: one alone waits for its own sums and quotients.
    """

    @inlinable
    def fit_sub_blocks(
        x: FloatTile,
        weights: FloatTile,
        size: int,
        top: int,
        first: np.float32,
        step: np.float32,
        steps: int,
        fit: AffineFit,
    ) -> None:
        for j in range(0, ELEMS // size, 2):
            sub, sub_weights = beside(tail(x, j * size), size), beside(tail(weights, j * size), size)
            scale, minus_low, inverse, code_low = search(sub, sub_weights, size, top, first, step, steps)
            beside(tail(fit.scales, j), 1)[0] = scale
            beside(tail(fit.minus_lows, j), 1)[0] = minus_low
            beside(tail(fit.inverses, j), 1)[0] = inverse
            beside(tail(fit.code_lows, j), 1)[0] = code_low

    return fit_sub_blocks


fit_sub_blocks = _fit_with(search_affine)
fit_sub_blocks_absolute = _fit_with(search_affine_absolute)


@inlinable
def fit_symmetric_sub_blocks(
    x: FloatTile, weights: FloatTile, half: int, scales: FloatTile, inverses: FloatTile
) -> None:
    """Fill scales and inverses with the result of `search_symmetric` for each sub-block of 16."""
    for j in range(ELEMS // 16):
        scales[j], inverses[j] = search_symmetric(tail(x, 16 * j), tail(weights, 16 * j), 16, half)


@inlinable
def code_by_largest(x: FloatTile, count: int, top: int, codes: IntTile) -> Floats:
    """Return the scale that gives the largest of x the code `top`, and fill `codes`, Ints, with bytes.

    What the K-quants do without importances. The byte of a negative x wraps around.
    """
    largest = splat(ZERO)
    for j in range(count):
        largest = maximum(x[j], largest)
    inverse = select(largest > ZERO, np.float32(top) / largest, ZERO)
    for j in range(count):
        codes[j] = nearest_int(inverse * x[j]) & 0xFF
    return largest / np.float32(top)


@inlinable
def codes_as_stored(x: FloatTile, fit: AffineFit, words: IntTile, top: int, codes: IntTile) -> None:
    """Fill 256 codes, 0 .. top, by what `words` of Q4_K or Q5_K hold: d, dmin, 8 scales and 8 minimums."""
    d = from_half_bits(words[0] & 0xFFFF)
    dmin = from_half_bits(shift_right_logical(words[0], 16))
    for j in range(8):
        scale = d * to_float(unpack_scale(tail(words, 1), 0, j))
        minus_low = dmin * to_float(unpack_scale(tail(words, 1), 1, j))
        sub, sub_codes = tail(x, 32 * j), tail(codes, 32 * j)
        affine_codes(sub, scale, minus_low, fit.inverses[j], fit.code_lows[j], 32, top, sub_codes)
