"""Steps that IQ1, IQ2 and IQ3 share around their searches: signs off, codes of scales and words of halves.

A super-block is 256 weights, coded as points of a grid. In IQ2 and IQ3 a sub-block is searched by its
magnitudes; signs are stored apart, a byte or seven bits for each eight weights. Where they are seven, the
count of signs is made even by one sign that is wrong. Scales of sub-blocks get codes of 4 bits, in IQ1 of 3.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from gguf_tools.format.ggml_types import GGMLType
from quantize.formats.base import Bytes, Floats32, Rows
from quantize.formats.block_kernels import Encode, Kernel
from quantize.simd.floats import HALF, ONE, ZERO, clamp, nearest_int
from quantize.simd.kernel import inlinable, kernel_of
from quantize.simd.lane_memory import FloatTile, IntTile, float_tile, int_tile, tail
from quantize.simd.lanes import LANES, Floats, Ints, Mask, any_lane, maximum, select, splat, square_root
from quantize.simd.tiles import (
    first_failure,
    first_not_finite,
    load_blocks,
    load_importances,
    padded_words,
    store_blocks,
)

ELEMS = 256
SIGNS = 8
"""Number of weights whose signs are stored together."""


class SubBlock(NamedTuple):
    """Tiles of Floats, one vector per element of a sub-block: magnitudes and what their errors cost."""

    x: FloatTile
    weights: FloatTile
    weighted: FloatTile  # weights * x
    roots: FloatTile  # square roots of the weights, which the search among neighbours takes


# ---- signs


@inlinable
def load_sub_block(
    x: FloatTile, weights: FloatTile, size: int, even: bool, sub: SubBlock, signs: IntTile
) -> None:
    """Fill `sub` from the elements x and their weights, and `signs`, Ints: bit i set where element i is < 0.

    even   make the count of signs even in each group, by the sign whose change costs least; the magnitude
           of that element becomes negative
    """
    for k in range(size // SIGNS):
        start = SIGNS * k
        signs[k] = _take_signs(tail(x, start), tail(weights, start), even, tail(sub.x, start))
    for i in range(size):
        sub.weights[i] = weights[i]
        sub.weighted[i] = weights[i] * sub.x[i]
        sub.roots[i] = square_root(weights[i])


@inlinable
def _take_signs(x: FloatTile, weights: FloatTile, even: bool, magnitudes: FloatTile) -> Ints:
    signs = splat(0)
    for i in range(SIGNS):
        negative = ~(x[i] >= ZERO)
        magnitudes[i] = select(negative, -x[i], x[i])
        signs |= select(negative, splat(1 << i), 0)
    if even:
        odd = signs ^ signs >> 4
        odd ^= odd >> 2
        odd ^= odd >> 1
        least = weights[0] * x[0] * x[0]
        flipped = splat(1)
        for i in range(1, SIGNS):
            cost = weights[i] * x[i] * x[i]
            flipped = select(cost < least, splat(1 << i), flipped)
            least = select(cost < least, cost, least)
        flipped = select((odd & 1) != 0, flipped, 0)
        for i in range(SIGNS):
            magnitudes[i] = select((flipped & 1 << i) != 0, -magnitudes[i], magnitudes[i])
        signs ^= flipped
    return signs


# ---- scales


@inlinable
def code_scales(scales: FloatTile, count: int, top: int, codes: IntTile) -> tuple[Floats, Mask]:
    """Return the scale of scales and where all scales are 0; fill `codes`, Ints 0 .. top.

    A code stands for 2 * code + 1.
    """
    largest = splat(ZERO)
    for j in range(count):
        largest = maximum(largest, scales[j])
    nothing = largest == ZERO
    d = largest / np.float32(2 * top + 1)
    inverse = ONE / d
    for j in range(count):
        code = clamp(nearest_int(HALF * (inverse * scales[j] - ONE)), 0, top)
        codes[j] = select(nothing, 0, code)
    return select(nothing, ZERO, d), nothing


# ---- blocks


@inlinable
def join_halves(halves: IntTile, count: int, words: IntTile) -> None:
    """Fill words with pairs of 16-bit halves; count is odd, the last word ends in zeros."""
    halves[count] = splat(0)
    for k in range((count + 1) // 2):
        words[k] = halves[2 * k] | halves[2 * k + 1] << 16


# ---- kernels


def plain_grid_kernel(type_: GGMLType) -> Callable[[Encode], Kernel]:
    """Return the decorator that makes a kernel of encode(grid, x, words), as `plain_kernel` does.

    The kernel is called as kernel(source, grid, out); encode returns the Mask of blocks that it can't encode.
    """
    n_bytes, n_words = type_.block_bytes, padded_words(type_.block_bytes)

    def made_of(encode: Encode) -> Kernel:
        encode_tile = inlinable(encode)

        def quantize(source: Rows, grid: Any, out: Bytes) -> int:
            x, words = float_tile(ELEMS), int_tile(n_words)
            n_blocks = out.size // n_bytes
            for first in range(0, n_blocks, LANES):
                if not load_blocks(source, first, ELEMS, x):
                    return first_not_finite(x, ELEMS, first, n_blocks)
                failed = encode_tile(grid, x, words)
                if any_lane(failed):
                    return first_failure(failed, first, n_blocks)
                store_blocks(words, out, first, n_bytes)
            return -1

        return kernel_of(encode, quantize)

    return made_of


def weighted_grid_kernel(type_: GGMLType) -> Callable[[Encode], Kernel]:
    """Return the decorator that makes a kernel of encode(grid, x, weights, words), as `weighted_kernel` does.

    The kernel is called as kernel(source, importances, grid, out); encode returns what a plain one does.
    """
    n_bytes, n_words = type_.block_bytes, padded_words(type_.block_bytes)

    def made_of(encode: Encode) -> Kernel:
        encode_tile = inlinable(encode)

        def quantize(source: Rows, importances: Floats32, grid: Any, out: Bytes) -> int:
            x, weights, words = float_tile(ELEMS), float_tile(ELEMS), int_tile(n_words)
            n_blocks = out.size // n_bytes
            for first in range(0, n_blocks, LANES):
                if not load_blocks(source, first, ELEMS, x):
                    return first_not_finite(x, ELEMS, first, n_blocks)
                load_importances(importances, first, ELEMS, weights)
                failed = encode_tile(grid, x, weights, words)
                if any_lane(failed):
                    return first_failure(failed, first, n_blocks)
                store_blocks(words, out, first, n_bytes)
            return -1

        return kernel_of(encode, quantize)

    return made_of
