"""Halves in kernels against numpy's and ml_dtypes' conversions, every half and the floats between them."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from quantize.simd.floats import (
    from_bfloat_bits,
    from_half_bits,
    halves_to_float32,
    to_bfloat_bits,
    to_half_bits,
)
from quantize.simd.kernel import inlinable
from quantize.simd.lane_memory import load, store
from quantize.simd.lanes import LANES

Array = npt.NDArray[Any]

ALL_HALVES = np.arange(2**16, dtype=np.uint16)


def in_lanes(convert: Any) -> Any:
    """Return a kernel that converts an array LANES items at a time."""

    @inlinable
    def run(x: Array, out: Array) -> None:
        for i in range(0, out.size, LANES):
            store(out, i, convert(load(x, i)))

    return run


def one_by_one(convert: Any) -> Any:
    """Return a kernel that converts an array item by item."""

    @inlinable
    def run(x: Array, out: Array) -> None:
        for i in range(out.size):
            out[i] = convert(x[i])

    return run


def both_ways(convert: Any) -> pytest.MarkDecorator:
    """Run a test with `run`, a kernel that converts an array, in lanes and item by item."""
    return pytest.mark.parametrize("run", [in_lanes(convert), one_by_one(convert)], ids=["lanes", "scalar"])


def floats_around(halves: Array) -> Array:
    """Return float32: the given numbers, the middles between neighbours, and what lies next to both."""
    with np.errstate(invalid="ignore"):  # signalling NaNs among the halves
        values = halves.astype(np.float64)
    finite = np.unique(values[np.isfinite(values)])
    exact = np.concatenate([finite, (finite[1:] + finite[:-1]) / 2]).astype(np.float32)
    near = [np.nextafter(exact, np.float32(np.inf)), np.nextafter(exact, np.float32(-np.inf))]
    rng = np.random.default_rng(1)
    random = rng.integers(0, 2**32, 2**16, np.uint32).view(np.float32)
    return np.resize(np.concatenate([exact, *near, random, -exact]), 2**19)


def assert_same_floats(ours: Array, expected: Array) -> None:
    """Assert equal bits; all NaNs are one."""
    nan = np.isnan(expected)
    np.testing.assert_array_equal(np.isnan(ours), nan)
    np.testing.assert_array_equal(ours.view(np.int32)[~nan], expected.view(np.int32)[~nan])


@both_ways(from_half_bits)
def test_every_float16_is_read_exactly(run: Any) -> None:
    out = np.empty(2**16, np.float32)
    run(ALL_HALVES.astype(np.int32), out)
    assert_same_floats(out, ALL_HALVES.view(np.float16).astype(np.float32))
    assert_same_floats(halves_to_float32(ALL_HALVES), out)


@both_ways(from_bfloat_bits)
def test_every_bfloat16_is_read_exactly(run: Any) -> None:
    out = np.empty(2**16, np.float32)
    run(ALL_HALVES.astype(np.int32), out)
    np.testing.assert_array_equal(out.view(np.uint32), ALL_HALVES.astype(np.uint32) << 16)


@both_ways(to_half_bits)
def test_floats_round_to_the_nearest_even_float16(run: Any) -> None:
    x = floats_around(ALL_HALVES.view(np.float16))
    out = np.empty(x.size, np.int32)
    run(x, out)
    with np.errstate(all="ignore"):
        expected = x.astype(np.float16).view(np.uint16).astype(np.int32)
    expected = np.where(np.isnan(x), 0x7E00 | (x.view(np.uint32) >> 16 & 0x8000).astype(np.int32), expected)
    np.testing.assert_array_equal(out, expected)


@both_ways(to_bfloat_bits)
def test_floats_round_to_the_nearest_even_bfloat16(run: Any) -> None:
    x = floats_around(ALL_HALVES.view(ml_dtypes.bfloat16))
    out = np.empty(x.size, np.int32)
    run(x, out)
    with np.errstate(all="ignore"):
        expected = x.astype(ml_dtypes.bfloat16).view(np.uint16).astype(np.int32)
    expected = np.where(np.isnan(x), (x.view(np.uint32) >> 16 | 0x40).astype(np.int32), expected)
    np.testing.assert_array_equal(out, expected)
