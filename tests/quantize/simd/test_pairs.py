"""Pairs of 16-bit integers and fours of bytes in lanes do what the same integers do in numpy."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from numba import njit

from quantize.simd.lane_items import byte_excess, halves_swapped, pair_difference, pair_norm, pair_product
from quantize.simd.lane_memory import load, store
from quantize.simd.lanes import LANES

OPERATIONS = 5


@njit
def run(left: npt.NDArray[np.int32], right: npt.NDArray[np.int32], out: npt.NDArray[np.int32]) -> None:
    for start in range(0, left.size, LANES):
        x, y = load(left, start), load(right, start)
        at = OPERATIONS * start
        store(out, at, pair_product(x, y))
        store(out, at + LANES, pair_difference(x, y))
        store(out, at + 2 * LANES, pair_norm(x))
        store(out, at + 3 * LANES, byte_excess(x, y))
        store(out, at + 4 * LANES, halves_swapped(x))


def test_operations_are_those_of_the_small_integers() -> None:
    rng = np.random.default_rng(0)
    left, right = rng.integers(-(2**31), 2**31, (2, 64 * LANES)).astype(np.int32)
    left[0] = right[0] = np.int32(-(2**31))  # halves of -32768 and 0
    out = np.empty(OPERATIONS * left.size, np.int32)
    run(left, right, out)
    products, differences, norms, excess, swapped = out.reshape(-1, OPERATIONS, LANES).transpose(1, 0, 2)
    x, y = (values.view(np.int16).astype(np.int64) for values in (left, right))
    np.testing.assert_array_equal(products.reshape(-1).view(np.int16), (x * y >> 16).astype(np.int16))
    np.testing.assert_array_equal(differences.reshape(-1).view(np.int16), (x - y).astype(np.int16))
    np.testing.assert_array_equal(norms.reshape(-1), (x**2).reshape(-1, 2).sum(axis=1).astype(np.int32))
    b, c = (values.view(np.uint8).astype(np.int64) for values in (left, right))
    np.testing.assert_array_equal(excess.reshape(-1).view(np.uint8), np.maximum(b - c, 0))
    by_half = left.reshape(-1, 2, LANES // 2)
    np.testing.assert_array_equal(swapped, by_half[:, ::-1].reshape(-1, LANES))
