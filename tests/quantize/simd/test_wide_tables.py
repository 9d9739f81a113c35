"""Look-ups in wide tables take the item that the index names, whatever its upper bits."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from numba import njit

from quantize.simd.lane_items import look_up_in
from quantize.simd.lane_memory import load, store
from quantize.simd.lanes import LANES


def _look_up(size: int) -> Callable[..., None]:
    @njit
    def run(table: np.ndarray, index: np.ndarray, out: np.ndarray) -> None:
        for start in range(0, index.size, LANES):
            store(out, start, look_up_in(table, size, load(index, start)))

    return run


@pytest.mark.parametrize("size", [16, 32, 64, 128])
def test_items_are_those_of_the_index(size: int) -> None:
    rng = np.random.default_rng(size)
    table = rng.standard_normal(size).astype(np.float32)
    index = rng.integers(-(2**31), 2**31, 16 * LANES).astype(np.int32)
    out = np.empty(index.size, np.float32)
    _look_up(size)(table, index, out)
    np.testing.assert_array_equal(out, table[index & (size - 1)])
