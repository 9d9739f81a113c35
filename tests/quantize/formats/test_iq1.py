"""What IQ1_S and IQ1_M do beyond the battery of every codec: sorting, the search cut short, refusals."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from numba import njit

from gguf_tools.errors import BadWeights, NeedsImportance
from quantize.formats import get_format
from quantize.formats.iq import grids
from quantize.formats.iq.iq1_search import MINUS_LOW, PLUS_LOW, nearest_points, point_tables
from quantize.simd.kernel import OPTIONS
from quantize.simd.lane_memory import float_tile, int_tile, load, store
from quantize.simd.lanes import LANES
from quantize.simd.sorting import exchanges, sort_16, sort_32
from tests.naive import grid_search
from tests.quantize.codecs import encode
from tests.support import oracle

needs_oracle = pytest.mark.skipif(not oracle.available(), reason="needs the xllamacpp wheel")


# ---- sorting


def test_exchanges_sort_all_that_can_be_wrong() -> None:
    """A network that sorts every sequence of 0 and 1 sorts everything."""
    items = np.array(list(product((0, 1), repeat=16)), np.int8)
    for low, high in exchanges(16):
        pair = items[:, [low, high]]
        items[:, low], items[:, high] = pair.min(axis=1), pair.max(axis=1)
    assert (np.diff(items, axis=1) >= 0).all()


@pytest.mark.parametrize(("sort", "size"), [(sort_16, 16), (sort_32, 32)])
def test_equals_stay_in_order(sort, size: int) -> None:  # type: ignore[no-untyped-def]
    @njit(**OPTIONS)
    def run(values, order, carried):  # type: ignore[no-untyped-def]
        keys, places, passengers = float_tile(32), int_tile(32), float_tile(32)
        for i in range(size):
            keys[i], passengers[i] = load(values, i * LANES), load(carried, i * LANES)
        sort(keys, places, passengers)
        for i in range(size):
            store(values, i * LANES, keys[i])
            store(order, i * LANES, places[i])
            store(carried, i * LANES, passengers[i])

    values = np.random.default_rng(0).choice([-1, -0.0, 0.0, 0.5, 3], (size, LANES)).astype(np.float32)
    carried = np.arange(size * LANES, dtype=np.float32).reshape(size, LANES)
    expected = np.argsort(values, axis=0, kind="stable")
    order = np.empty((size, LANES), np.int32)
    found, passengers = values.copy(), carried.copy()
    run(found.reshape(-1), order.reshape(-1), passengers.reshape(-1))
    np.testing.assert_array_equal(order, expected)
    np.testing.assert_array_equal(found, np.take_along_axis(values, expected, axis=0))
    np.testing.assert_array_equal(passengers, np.take_along_axis(carried, expected, axis=0))


@pytest.mark.slow  # ggml takes 9 seconds to lay out its grid
@needs_oracle
@pytest.mark.parametrize("name", ["IQ1_S", "IQ1_M"])
def test_rows_full_of_equals(name: str) -> None:
    codec = get_format(name)
    rng = np.random.default_rng(0)
    rows = rng.choice([-2, -1, -0.0, 0, 1], (33, 512)).astype(np.float32)
    weights = rng.random(512, np.float32)
    ours = encode(codec.type, rows, weights)
    np.testing.assert_array_equal(ours, oracle.quantize(codec.type.id, rows, weights))


# ---- the search off the grid


def test_distances_are_those_of_the_nearest_in_each_vector() -> None:
    found = point_tables()
    chunk = 0
    for number in np.flatnonzero(found.entries < 0)[:500]:
        levels = grids.IQ1.levels_of(np.array([number])).astype(int)
        for _ in range(~found.entries[number] & 0xFF):
            codes = found.lists[chunk * LANES : (chunk + 1) * LANES]
            distances = (((codes[:, None] >> 2 * np.arange(8) & 3) - levels) ** 2).sum(axis=1)
            assert distances.min() == found.distances[chunk]
            chunk += 1


@njit(**OPTIONS)
def _search(found, x, weights, lows, scales, codes, entries, out):  # type: ignore[no-untyped-def]
    tile, tile_weights, tile_codes = float_tile(8), float_tile(8), int_tile(8)
    for first in range(0, len(scales), LANES):
        for i in range(8):
            place = i * len(scales) + first
            tile[i], tile_weights[i], tile_codes[i] = load(x, place), load(weights, place), load(codes, place)
        low, scale, entry = load(lows, first), load(scales, first), load(entries, first)
        store(out, first, nearest_points(found, tile, tile_weights, low, scale, tile_codes, entry))


@pytest.mark.parametrize("size", [1e-40, 1e-25, 1e-19, 1, 1e6, 1e12, 1e19])
@pytest.mark.parametrize("nearby", [True, False])
def test_bounds_change_no_answer(size: float, nearby: bool) -> None:
    """The point is the nearest one, as in the codec, or any; some weights are 0, some elements alike."""
    rng = np.random.default_rng(0)
    n = 64 * LANES
    low = np.repeat(rng.choice(np.array([PLUS_LOW, MINUS_LOW]), n // LANES), LANES)
    x = np.where(rng.random((8, n)) < 0.3, rng.integers(-3, 4, (8, n)) / 2, rng.standard_normal((8, n)))
    weights = np.where(rng.random((8, n)) < 0.2, 0, 10 ** rng.uniform(-3, 3, (8, n)))
    scale = rng.uniform(0.5, 2, n)
    levels = np.clip(np.rint(x / scale - low), 0, 2) if nearby else rng.integers(0, 3, (8, n))
    codes = levels.astype(np.int32)
    numbers = (codes * 3 ** np.arange(8)[:, None]).sum(axis=0)
    found = point_tables()
    entries = found.entries[numbers]
    x, weights = (x * size).astype(np.float32), weights.astype(np.float32)
    low, scale = low.astype(np.float32), (scale * size).astype(np.float32)
    out = np.empty(n, np.int32)
    _search(found, x.reshape(-1), weights.reshape(-1), low, scale, codes.reshape(-1), entries, out)
    values = np.arange(3, dtype=np.float32) + low[:, None]
    each = zip(numbers.tolist(), x.T, weights.T, scale, values, strict=True)
    expected = [grid_search.nearest(grids.IQ1, *question) for question in each]
    assert (entries < 0).mean() > 0.3
    np.testing.assert_array_equal(out, expected)


# ---- refusals


def test_iq1_s_needs_importances() -> None:
    with pytest.raises(NeedsImportance, match="IQ1_S"):
        get_format("IQ1_S").encode(np.zeros((1, 256), np.float32), None)


@pytest.mark.parametrize("name", ["IQ1_S", "IQ1_M"])
def test_errors_beyond_float32(name: str) -> None:
    """ggml aborts: the best cut gives a point off the grid, and the errors of all its neighbours overflow."""
    codec = get_format(name)
    rows, weights = np.zeros((3, 512), np.float32), np.zeros(512, np.float32)
    rows[2, 256:264] = [-2e14, -1e14, 0, 0, 0, 0, 0, 1e14]
    weights[[257, 263]] = 1
    with pytest.raises(BadWeights, match=f"{name}: row 2, columns 256 to 511"):
        encode(codec.type, rows, weights)
