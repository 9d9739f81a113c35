"""The grids and the search among neighbours, against their definitions spelt out."""

from __future__ import annotations

import numpy as np
import pytest
from numba import njit

from quantize.formats.iq import grids
from quantize.formats.iq.grids import COUNT_BITS, NOWHERE, tables
from quantize.formats.iq.grids import cached_search_4 as kept_answers
from quantize.formats.iq.grids import cached_search_8 as kept_answers_of_8
from quantize.formats.iq.grids.cached_search_4 import Answers, prepare_once
from quantize.simd.kernel import OPTIONS
from quantize.simd.lane_items import item, least, look_up, lowest_bit, mask_word, put_item
from quantize.simd.lane_memory import float_tile, int_tile, load, store
from quantize.simd.lanes import LANES, splat
from quantize.simd.octets import EIGHT
from tests.naive import grid_search

GRIDS = {
    "IQ2_XXS": (grids.IQ2_XXS, 256),
    "IQ2_XS": (grids.IQ2_XS, 512),
    "IQ2_S": (grids.IQ2_S, 1024),
    "IQ1_S": (grids.IQ1, 2048),
    "IQ3_XXS": (grids.IQ3_XXS, 256),
    "IQ3_S": (grids.IQ3_S, 512),
}
every_grid = pytest.mark.parametrize("name", GRIDS)


@every_grid
def test_points_are_distinct_and_in_ascending_order(name: str) -> None:
    grid, count = GRIDS[name]
    assert len(grid.numbers) == len(grid.codes) == count
    assert (np.diff(grid.numbers) > 0).all()
    assert (np.diff(grid.codes) > 0).all()
    assert grid.numbers[-1] < grid.base**grid.size
    assert {*grid.levels.reshape(-1)} == set(range(grid.base))
    assert (np.diff(grid.values) > 0).all()


@every_grid
def test_points_are_those_of_gguf_py(name: str) -> None:
    quants = pytest.importorskip("gguf.quants")
    theirs = getattr(quants, name)
    theirs.init_grid()
    grid, _ = GRIDS[name]
    np.testing.assert_array_equal(grid.points, theirs.grid.reshape(-1, grid.size))


@every_grid
def test_neighbours_are_the_nearest_shells_in_order(name: str) -> None:
    grid, _ = GRIDS[name]
    found = tables(grid)
    for number in np.random.default_rng(0).integers(0, grid.base**grid.size, 200):
        levels = grid.levels_of(np.array([number]))
        entry = int(found.entries[number])
        if number in grid.numbers:
            assert entry == grid.codes_of(levels)[0]
            assert found.indices[entry] == np.searchsorted(grid.numbers, number)
            continue
        expected = grid.codes[grid_search.neighbours(grid, number)]
        start, chunks = ~entry >> COUNT_BITS, ~entry & (1 << COUNT_BITS) - 1
        listed = found.lists[start * LANES : (start + chunks) * LANES]
        np.testing.assert_array_equal(listed[: len(expected)], expected)
        assert (listed[len(expected) :] == expected[-1]).all()
        assert len(listed) - len(expected) < LANES


@pytest.mark.parametrize("name", [name for name in GRIDS if name != "IQ1_S"])  # which has a search of its own
def test_nearest_neighbour(name: str) -> None:
    grid, _ = GRIDS[name]
    size, found, n_groups = grid.size, tables(grid, EIGHT), 64 // LANES
    of_eight, answer_four, answer_eight = size == 8, kept_answers.answer, kept_answers_of_8.answer

    @njit(**OPTIONS)
    def search(found, numbers, x, weights, scales, out):  # type: ignore[no-untyped-def]
        tile, costs, ints, floats = float_tile(64), float_tile(64), int_tile(16), float_tile(16)
        answers = Answers(ints, int_tile(16), int_tile(16), int_tile(16), floats, float_tile(16))
        prepare_once(n_groups, answers)
        for k in range(n_groups):
            answers.wanted[k], answers.numbers[k] = splat(1), load(numbers, LANES * k)
            for i in range(size):
                tile[size * k + i] = load(x, LANES * (size * k + i))
                costs[size * k + i] = load(weights, LANES * (size * k + i))
        scale = load(scales, 0)
        inverse = np.float32(1) / scale
        if of_eight:
            answer_eight(found, tile, costs, scale, inverse, scale, n_groups, answers)
        else:
            answer_four(found, tile, costs, scale, inverse, n_groups, answers)
        for k in range(n_groups):
            store(out, LANES * k, answers.codes[k])

    rng = np.random.default_rng(1)
    values = (2 * np.arange(grid.base) + 1).astype(np.float32)
    for trial in range(5):
        numbers = rng.integers(0, grid.base**size, (n_groups, LANES)).astype(np.int32)
        x = rng.integers(0, 12, (n_groups, size, LANES)).astype(np.float32)  # small integers: many ties
        weights = rng.integers(0, 3, x.shape).astype(np.float32)
        scales = rng.integers(1, 3, LANES).astype(np.float32)
        if trial == 0:
            numbers[0, 0] = np.flatnonzero(found.entries < 0)[0]
            weights[0, :, 0] = np.inf
        out = np.zeros(numbers.shape, np.int32)
        search(found, numbers.reshape(-1), x.reshape(-1), weights.reshape(-1), scales, out.reshape(-1))
        assert (out[0, 0] == NOWHERE) == (trial == 0)
        for k, lane in np.ndindex(numbers.shape):
            ours, costs = x[k, :, lane], weights[k, :, lane]
            expected = grid_search.nearest(grid, int(numbers[k, lane]), ours, costs, scales[lane], values)
            assert out[k, lane] == expected


# ---- single lanes


@njit(**OPTIONS)
def _lane_items(floats, ints, index, out_floats, out_ints):  # type: ignore[no-untyped-def]
    tile = float_tile(2)
    tile[0], tile[1] = load(floats, 0), load(floats, 0)
    put_item(tile, 1, 5, item(tile, 0, 3))
    store(out_floats, 0, tile[1])
    store(out_floats, LANES, look_up(tile[0], load(index, 0)))
    word = mask_word(load(ints, 0) < 0)
    out_ints[0], out_ints[1], out_ints[2] = word, lowest_bit(word), least(load(ints, 0))
    return least(tile[0])


def test_single_lanes() -> None:
    rng = np.random.default_rng(2)
    floats = rng.standard_normal(LANES).astype(np.float32)
    ints = rng.integers(-(2**31), 2**31, LANES).astype(np.int32)
    index = rng.integers(-(2**31), 2**31, LANES).astype(np.int32)
    out_floats, out_ints = np.zeros(2 * LANES, np.float32), np.zeros(3, np.int64)
    smallest = _lane_items(floats, ints, index, out_floats, out_ints)
    assert smallest == floats.min()
    moved = floats.copy()
    moved[5] = floats[3]
    np.testing.assert_array_equal(out_floats[:LANES], moved)
    np.testing.assert_array_equal(out_floats[LANES:], floats[index & 7])
    negative = np.flatnonzero(ints < 0)
    assert list(out_ints) == [(1 << negative).sum(), negative[0], ints.min()]


@pytest.mark.parametrize(
    ("name", "most"), [("IQ2_XXS", 40), ("IQ2_XS", 40), ("IQ2_S", 40), ("IQ3_XXS", 8), ("IQ3_S", 8)]
)
def test_lists_are_no_longer_than_the_searches_have_room_for(name: str, most: int) -> None:
    assert most == (kept_answers_of_8 if most == 40 else kept_answers).MOST_OCTETS
    entries = tables(GRIDS[name][0], EIGHT).entries
    assert (~entries[entries < 0] & (1 << COUNT_BITS) - 1).max() <= most
