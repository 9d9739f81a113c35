"""Grid types under feedback: trees, layouts, and the kernels against their twins."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quantize.formats.base import as_source
from quantize.formats.iq import grids
from quantize.rounding.base import Effort
from quantize.rounding.factor import Factor
from quantize.rounding.grids.rounders import GRID_ROUNDERS, LAYOUTS
from quantize.rounding.grids.tree_search import tree
from quantize.rounding.products import errors_of
from tests.naive import grid_feedback as naive
from tests.quantize.codecs import decode, encode
from tests.quantize.rounding.moments import correlated, weights

ROUNDERS = {each.type.name: each for each in GRID_ROUNDERS}
SLOW_TWINS = ("IQ1_S", "IQ1_M")
"""Types whose twin in plain Python takes seconds."""


def _slow(name: str) -> Any:
    return pytest.param(name, marks=pytest.mark.slow)


every_type = pytest.mark.parametrize("name", ROUNDERS)
every_grid = pytest.mark.parametrize("name", ["IQ1", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"])

N = 256
FACTOR = Factor.of(correlated(N))
UPPER = FACTOR.upper
PANEL = FACTOR.panel(0, N)


@every_grid
def test_every_point_is_a_leaf_and_its_levels_are_the_way_there(name: str) -> None:
    grid = getattr(grids, name)
    nodes = tree(grid)
    levels: dict[int, tuple[int, ...]] = {0: ()}
    for node in range(len(nodes.codes)):
        for child in range(nodes.starts[node], nodes.starts[node + 1]):
            levels[child] = (*levels[node], int(nodes.levels[child]))
    assert sorted(levels) == list(range(len(nodes.codes)))
    leaves = {way: int(nodes.codes[node]) for node, way in levels.items() if len(way) == grid.size}
    points = [tuple(int(level) for level in point) for point in grid.levels]
    assert leaves == dict(zip(points, (int(code) for code in grid.codes), strict=True))


@every_type
@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**31))
def test_blocks_are_written_as_they_were_read(name: str, seed: int) -> None:
    layout = LAYOUTS[name]
    data = np.random.default_rng(seed).integers(0, 256, (5, layout.type.block_bytes)).astype(np.uint8)
    at = slice(48, 56) if name == "IQ1_M" else slice(0, 2)
    data[:, at] &= 0x3F  # d is a finite number
    np.testing.assert_array_equal(layout.write(layout.read(data)), data)


@every_type
def test_a_read_block_has_the_values_that_it_decodes_to(name: str) -> None:
    rounder = ROUNDERS[name]
    data = encode(name, weights(7, N), np.ones(N, np.float32))
    blocks = rounder.layout.read(data)
    form = rounder.form
    levels = rounder.grid.points[blocks.indices].reshape(-1, N)
    bits = np.unpackbits(blocks.signs, axis=1, bitorder="little")
    signed = levels + (0.125 - 0.25 * bits) if name.startswith("IQ1") else levels * (1 - 2.0 * bits)
    scales = np.repeat(form.offset + form.slope * blocks.scales, form.sub_elems, axis=1)
    np.testing.assert_allclose(blocks.d[:, None] * scales * signed, decode(name, data), rtol=1e-6)


@pytest.mark.parametrize("name", [_slow(name) if name in SLOW_TWINS else name for name in ROUNDERS])
def test_the_first_sub_block_gets_the_scale_and_points_of_the_twin(name: str) -> None:
    rounder = ROUNDERS[name]
    form, size = rounder.form, rounder.form.sub_elems
    rows = weights(3, N, seed=3)
    values = rounder.round_block(rows, PANEL, Effort(super_scales=1))[1]
    stock = rounder.layout.read(encode(name, rows, FACTOR.importances))
    points = rounder.grid.points.astype(np.float32)
    for row, d, scale, ours in zip(rows, stock.d, stock.scales[:, 0], values, strict=True):
        near = [min(max(int(scale) + change, 0), form.top) for change in (0, 1, -1)]
        units = [d * (form.offset + form.slope * np.float32(s)) for s in near]
        _cost, unit, levels = naive.round_at_scales(name, points, row[:size], UPPER[:size, :size], units)
        np.testing.assert_allclose(ours[:size], levels * unit, rtol=1e-6)


@every_type
def test_costs_are_those_of_what_the_bytes_decode_to(name: str) -> None:
    rounder = ROUNDERS[name]
    rows = weights(21, N)
    start = rounder.layout.read(encode(name, rows, FACTOR.importances))
    attempt = rounder.attempt(rows, UPPER, 1, start.d, start.scales)
    moves = rows - decode(name, rounder.layout.write(rounder.blocks(*attempt[:4])))
    errors = np.empty_like(moves)
    errors_of(as_source(moves), as_source(UPPER), N, errors.reshape(-1))
    np.testing.assert_allclose(attempt.costs, (errors.astype(float) ** 2).sum(axis=1), rtol=1e-4)


@every_type
def test_the_factor_of_d_fits_best(name: str) -> None:
    rounder = ROUNDERS[name]
    rows = weights(9, N)
    start = rounder.layout.read(encode(name, rows, FACTOR.importances))
    attempt = rounder.attempt(rows, UPPER, 1, start.d, start.scales)
    values = decode(name, rounder.layout.write(rounder.blocks(*attempt[:4]))).astype(float)
    costs = [
        np.einsum(
            "rc,cd,rd->r", rows - factor[:, None] * values, FACTOR.hessian, rows - factor[:, None] * values
        )
        for factor in (attempt.factors * 0.999, attempt.factors, attempt.factors * 1.001)
    ]
    assert (costs[1] < costs[0]).all()
    assert (costs[1] < costs[2]).all()


@every_type
def test_more_scales_of_scales_cost_less(name: str) -> None:
    rounder = ROUNDERS[name]
    rows = weights(48, N)
    by_count = []
    for count in (1, 2, 4, 6):
        _data, values = rounder.round_block(rows, PANEL, Effort(super_scales=count))
        errors = rows.astype(float) - values
        by_count.append(np.einsum("rc,cd,rd->r", errors, FACTOR.hessian, errors))
    for fewer, more in pairwise(by_count):
        assert (more <= fewer * (1 + 1e-5)).all()
        assert more.sum() < fewer.sum()


@every_type
def test_the_first_sub_block_is_chosen_anew_as_by_the_twin(name: str) -> None:
    rounder = ROUNDERS[name]
    form, size, grid = rounder.form, rounder.form.sub_elems, rounder.grid
    rows = weights(3, N, seed=5)
    data = encode(name, rows, np.ones(N, np.float32))
    values = decode(name, data)
    pulls = (rows - values) @ FACTOR.hessian
    after = rounder.layout.read(rounder.refine_block(data, pulls, PANEL, Effort())[0])
    before = rounder.layout.read(data)
    upper = FACTOR.local_uppers(size)[:size]
    moments = FACTOR.hessian[:size, :size].astype(float)
    moved = 0
    for row in range(len(rows)):
        target = values[row, :size] + np.linalg.solve(moments, pulls[row, :size])
        standing = np.linalg.norm(np.linalg.solve(upper.T.astype(float), target - values[row, :size])) ** 2
        start = before.scales[row, 0]
        scales = [start, min(start + 1, form.top), max(start - 1, 0)]
        units = [before.d[row] * (form.offset + form.slope * np.float32(scale)) for scale in scales]
        points = grid.points.astype(np.float32)
        cost, unit, levels = naive.round_at_scales(name, points, target.astype(np.float32), upper, units)
        if cost < 0.999 * standing:
            moved += 1
            assert after.scales[row, 0] == scales[units.index(unit)]
            points = grid.points[after.indices[row]].reshape(-1)[:size]
            bits = np.unpackbits(after.signs[row], bitorder="little")[:size]
            signed = points + (0.125 - 0.25 * bits) if name.startswith("IQ1") else points * (1 - 2.0 * bits)
            np.testing.assert_array_equal(signed, levels)
    assert moved
