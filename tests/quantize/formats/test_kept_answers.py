"""The search off the grid that keeps answers while a scale falls, beside the naive one that keeps none."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from quantize.formats.iq import grids
from quantize.formats.iq.grids import COUNT_BITS, GridTables, tables
from quantize.formats.iq.grids.cached_search_4 import GROUP, MOST_OCTETS, Answers, answer, prepare
from quantize.formats.iq.iq3_search import _number
from quantize.simd.kernel import inlinable
from quantize.simd.lane_memory import float_tile, int_tile, load, store, tail
from quantize.simd.lanes import LANES, splat
from quantize.simd.octets import EIGHT
from tests.naive import iq3

GRIDS = pytest.mark.parametrize("points", [iq3.XXS, iq3.S], ids=["IQ3_XXS", "IQ3_S"])
GROUPS = 64 // LANES
OF = {iq3.XXS: grids.IQ3_XXS, iq3.S: grids.IQ3_S}

Floats = npt.NDArray[np.float32]


@inlinable
def _answers(
    grid: GridTables, x: Floats, weights: Floats, inverses: Floats, out: npt.NDArray[np.int32]
) -> None:
    """Fill out (n_scales * GROUPS * LANES,) for x and weights (GROUPS * GROUP * LANES,)."""
    values, costs = float_tile(64), float_tile(64)
    for i in range(GROUPS * GROUP):
        values[i], costs[i] = load(x, i * LANES), load(weights, i * LANES)
    answers = Answers(int_tile(16), int_tile(16), int_tile(16), int_tile(16), float_tile(16), float_tile(16))
    one = np.float32(1)
    lowest, highest = one / splat(inverses[-1]), one / splat(inverses[0])
    prepare(values, costs, lowest, highest, GROUPS, answers)
    for step in range(inverses.size):
        inverse = splat(inverses[step])
        for k in range(GROUPS):
            answers.wanted[k] = splat(1)
            answers.numbers[k] = _number(tail(values, GROUP * k), inverse)
        answer(grid, values, costs, one / inverse, inverse, GROUPS, answers)
        for k in range(GROUPS):
            store(out, (step * GROUPS + k) * LANES, answers.codes[k])


def samples(kind: str) -> tuple[Floats, Floats]:
    """Return magnitudes that inverse scales around 1 bring to 0 .. 16, and weights."""
    rng = np.random.default_rng(7)
    x = rng.uniform(-1, 16, (GROUPS, GROUP, LANES))
    weights = rng.gamma(0.5, 2, x.shape)
    if kind == "ties":
        x, weights = np.round(x), np.ones(x.shape)
    if kind == "zero weights":
        weights[rng.random(x.shape) < 0.6] = 0
    if kind == "tiny":
        x, weights = x * 1e-12, weights * 1e-20
    return x.astype(np.float32), weights.astype(np.float32)


@GRIDS
@pytest.mark.parametrize("kind", ["random", "ties", "zero weights", "tiny"])
def test_answers_are_those_of_a_new_search(points: iq3.Points, kind: str) -> None:
    x, weights = samples(kind)
    unit = np.float32(1e12 if kind == "tiny" else 1)
    inverses = (np.linspace(0.8, 1.2, 31) * unit).astype(np.float32)
    out = np.empty(inverses.size * GROUPS * LANES, np.int32)
    _answers(tables(OF[points], EIGHT), x.reshape(-1), weights.reshape(-1), inverses, out)
    for inverse, codes in zip(inverses, out.reshape(-1, GROUPS, LANES), strict=True):
        for k in range(GROUPS):
            for lane in range(0, LANES, 3):
                ours = tuple(int(codes[k, lane]) >> 3 * i & 7 for i in range(GROUP))
                group = x[k, :, lane]
                levels = iq3.levels_for(inverse, group)
                assert ours == points.best(levels, group, list(weights[k, :, lane]), np.float32(1) / inverse)


@GRIDS
def test_no_list_is_longer_than_the_search_can_hold(points: iq3.Points) -> None:
    found = tables(OF[points], EIGHT)
    octets = ~found.entries[found.entries < 0] & (1 << COUNT_BITS) - 1
    assert octets.min() >= 1
    assert octets.max() <= MOST_OCTETS


@GRIDS
def test_lists_are_the_naive_neighbours(points: iq3.Points) -> None:
    grid, found = OF[points], tables(OF[points], EIGHT)
    for number in range(0, 4096, 37):
        entry = int(found.entries[number])
        levels = tuple(number >> 3 * i & 7 for i in range(GROUP))
        if entry >= 0:
            assert levels in points.index
            assert entry == number
            continue
        start, count = ~entry >> COUNT_BITS, ~entry & (1 << COUNT_BITS) - 1
        codes = found.lists[start * EIGHT : (start + count) * EIGHT]
        near = grid.codes[points.near(levels)]
        np.testing.assert_array_equal(codes[: len(near)], near)
        assert set(codes[len(near) :]) <= {near[-1]}
        assert len(codes) - len(near) < EIGHT


def test_points_of_the_grids() -> None:
    for grid, n_points in ((grids.IQ3_XXS, 256), (grids.IQ3_S, 512)):
        assert len(grid.codes) == n_points
        assert (np.diff(grid.codes) > 0).all()
        assert (grid.levels[0] == 0).all()  # what a search without a result stores
        assert grid.levels.max() == 7
