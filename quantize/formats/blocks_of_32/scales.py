"""Scales of Q4_0, Q4_1, Q5_0, Q5_1 and Q8_0, which share a layout: 32 weights and one scale a block.

Without importances the scale follows from the largest weight (Q4_0, Q5_0: `fit_symmetric`) or from the range
(Q4_1, Q5_1: `fit_range`). With importances a search finds it, and an error in a weight x counts by

    importance * sqrt(mean square of the whole row of x + x * x)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from gguf_tools.format.ggml_types import GGMLType
from quantize.formats.base import Bytes, Floats32, Rows
from quantize.formats.block_kernels import Encode, Kernel
from quantize.simd.floats import HALF, INFINITY, ONE, ZERO
from quantize.simd.kernel import inlinable, kernel_of
from quantize.simd.lane_memory import FloatTile, IntTile, float_tile, int_tile, load, store
from quantize.simd.lanes import (
    LANES,
    Floats,
    Ints,
    absolute,
    lane_numbers,
    maximum,
    minimum,
    select,
    splat,
    square_root,
    to_int,
)
from quantize.simd.tiles import (
    first_not_finite,
    load_blocks,
    load_columns,
    load_importances,
    padded_words,
    store_blocks,
)

ELEMS = 32


@inlinable
def fit_symmetric(x: FloatTile, half: int, codes: IntTile) -> Floats:
    """Return the d that maps the weight of largest magnitude to the code 0, and fill `codes`, 0 .. 2*half-1.

    Where 1 / d overflows, the reference converts infinities and NaN to integers and gets 0.
    """
    largest = splat(ZERO)
    extreme = splat(ZERO)
    for i in range(ELEMS):
        farther = absolute(x[i]) > largest
        largest = select(farther, absolute(x[i]), largest)
        extreme = select(farther, x[i], extreme)
    d = extreme / np.float32(-half)
    inverse = ONE / d
    infinite = absolute(inverse) == INFINITY
    inverse = select(infinite, ZERO, inverse)
    middle = select(infinite & (d != ZERO), ZERO, np.float32(half + HALF) + splat(ZERO))
    for i in range(ELEMS):
        codes[i] = minimum(to_int(x[i] * inverse + middle), 2 * half - 1)
    return d


@inlinable
def fit_range(x: FloatTile, top: int, codes: IntTile) -> tuple[Floats, Floats]:
    """Return d and the least weight m, so that the largest weight is m + d * top, and fill `codes`, 0 .. top.

    Where the range or 1 / d overflows, the reference converts infinities and NaN to integers and gets 0.
    """
    low = x[0]
    high = x[0]
    for i in range(1, ELEMS):
        low = minimum(x[i], low)
        high = maximum(x[i], high)
    d = (high - low) / np.float32(top)
    inverse = ONE / d
    inverse = select(inverse == INFINITY, ZERO, inverse)
    for i in range(ELEMS):
        codes[i] = to_int(maximum((x[i] - low) * inverse, ZERO) + HALF)
    return d, low


@inlinable
def row_mean_squares(source: npt.NDArray[Any], n_cols: int) -> npt.NDArray[np.float32]:
    """Return the mean square of each block's row, float32 (n_blocks + LANES,).

    The surplus is for the last tile, which may be ragged. Lanes are rows here: squares are summed in
    index order.
    """
    x = float_tile(ELEMS)
    per_row = n_cols // ELEMS
    n_rows = source.size // n_cols
    means = np.zeros(n_rows * per_row + LANES, np.float32)
    of_rows = np.empty(LANES, np.float32)
    for first in range(0, n_rows, LANES):
        total = splat(ZERO)
        for column in range(0, n_cols, ELEMS):
            load_columns(source, n_cols, first, column, ELEMS, x)
            for i in range(ELEMS):
                total += x[i] * x[i]
        store(of_rows, 0, total / np.float32(n_cols))
        for row in range(first, min(first + LANES, n_rows)):
            means[row * per_row : (row + 1) * per_row] = of_rows[row - first]
    return means


@inlinable
def load_weighted(
    source: npt.NDArray[Any],
    importances: npt.NDArray[np.float32],
    means: npt.NDArray[np.float32],
    first: int,
    x: FloatTile,
    weights: FloatTile,
) -> bool:
    """Fill x and weights with blocks first .. first + LANES - 1, and return whether all of x is finite.

    means  of `row_mean_squares`
    """
    finite = load_blocks(source, first, ELEMS, x)
    load_importances(importances, first, ELEMS, weights)
    mean = load(means, first)
    for i in range(ELEMS):
        weights[i] = weights[i] * square_root(mean + x[i] * x[i])
    return finite


def row_weighted_kernel(type_: GGMLType) -> Callable[[Encode], Kernel]:
    """Return the decorator that makes a kernel as `weighted_kernel` does; weights are those of errors."""
    n_bytes, n_words = type_.block_bytes, padded_words(type_.block_bytes)

    def made_of(encode: Encode) -> Kernel:
        encode_tile = inlinable(encode)

        def quantize(source: Rows, importances: Floats32, out: Bytes) -> int:
            x, weights, words = float_tile(ELEMS), float_tile(ELEMS), int_tile(n_words)
            means = row_mean_squares(source, importances.size)
            n_blocks = out.size // n_bytes
            for first in range(0, n_blocks, LANES):
                if not load_weighted(source, importances, means, first, x, weights):
                    return first_not_finite(x, ELEMS, first, n_blocks)
                encode_tile(x, weights, words)
                store_blocks(words, out, first, n_bytes)
            return -1

        return kernel_of(encode, quantize)

    return made_of


@inlinable
def fifth_bits(codes: IntTile) -> Ints:
    """Return bit 4 of each of 32 codes, that of code i as bit i of a word."""
    word = splat(0)
    for i in range(ELEMS):
        word |= (codes[i] >> 4 & 1) << i
    return word


@inlinable
def fifth_bits_at(data: npt.NDArray[np.uint8], offset: int, first: int) -> Ints:
    """Return the fifth bits of codes first .. first + LANES - 1, as 0 or 16, from 4 bytes at data[offset]."""
    word = data[offset] | data[offset + 1] << 8 | data[offset + 2] << 16 | data[offset + 3] << 24
    return (splat(word) >> (lane_numbers() + first) & 1) << 4


@inlinable
def add_minimum(product: Floats, m: np.float32) -> Floats:
    """Return product + m, and the product where both are NaN: a compiler may exchange what it adds."""
    return select(product != product, product, product + m)
