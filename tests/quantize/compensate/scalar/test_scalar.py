"""Layouts are read and written without a change, and the kernel decides as its twin does."""

from __future__ import annotations

import numpy as np
import pytest

from quantize.compensate.factor import Factor
from quantize.compensate.scalar import k_quants
from quantize.compensate.scalar.blocks import Layout
from quantize.compensate.scalar.rounder import ScalarRounder
from quantize.compensate.scalar.rounding import round_evenly
from quantize.formats.base import as_source
from tests.naive import feedback as naive
from tests.quantize.codecs import decode
from tests.quantize.compensate.moments import correlated, weights

LAYOUTS = [rounder.layout for rounder in k_quants.ROUNDERS.values() if isinstance(rounder, ScalarRounder)]
every_layout = pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.type.name)


def random_blocks(layout: Layout, n: int) -> np.ndarray:
    """Return blocks of random bytes whose floats are finite."""
    data = np.random.default_rng(0).integers(0, 256, (4 * n, layout.type.block_bytes), np.uint8)
    with np.errstate(all="ignore"):
        finite = np.isfinite(decode(layout.type, data)).all(1)
    assert finite.sum() >= n
    return data[finite][:n]


@every_layout
def test_blocks_are_read_and_written_without_a_change(layout: Layout) -> None:
    data = random_blocks(layout, 50)
    np.testing.assert_array_equal(layout.write(layout.read(data)), data)


@every_layout
def test_lines_give_the_values_that_the_decoder_gives(layout: Layout) -> None:
    data = random_blocks(layout, 50)
    blocks = layout.read(data)
    slopes, lows = (np.repeat(line, layout.sub_elems, axis=1) for line in layout.lines(blocks))
    levels = blocks.codes.astype(np.float32) + np.float32(layout.lowest)
    np.testing.assert_array_equal(slopes * levels - lows, decode(layout.type, data))


@every_layout
def test_neighbours_can_be_stored(layout: Layout) -> None:
    blocks = layout.read(random_blocks(layout, 20))
    neighbours = layout.neighbours(blocks, 2)
    for first, again in zip(layout.lines(neighbours[0]), layout.lines(blocks), strict=True):
        np.testing.assert_array_equal(first, again)
    assert len(neighbours) > 1
    for neighbour in neighbours:
        stored = layout.read(layout.write(neighbour))
        for field in ("d", "dmin", "scales", "lows", "codes"):
            np.testing.assert_array_equal(getattr(stored, field), getattr(neighbour, field))


@pytest.mark.parametrize(
    ("n", "sub_elems", "levels"), [(256, 16, (0, 3)), (256, 32, (-4, 3)), (32, 32, (0, 15))]
)
def test_the_kernel_decides_as_its_twin(n: int, sub_elems: int, levels: tuple[int, int]) -> None:
    n_rows, n_candidates, padded = 18, 4, 32
    rows, rng = weights(n_rows, n), np.random.default_rng(5)
    upper = Factor.of(correlated(n)).upper
    shape = (n // sub_elems, n_candidates, padded)
    slopes = (0.06 / (levels[1] - levels[0]) * rng.uniform(0.5, 1.5, shape)).astype(np.float32)
    slopes[0, 1] = 0
    lows = rng.uniform(0, 0.04, shape).astype(np.float32)
    codes, choices = np.empty((n_rows, n), np.uint8), np.empty((n // sub_elems, padded), np.int32)
    sources = [as_source(array) for array in (rows, upper, slopes, lows)]
    round_evenly(
        *sources[:2],
        n,
        sub_elems,
        *sources[2:],
        n_candidates,
        *levels,
        codes.reshape(-1),
        choices.reshape(-1),
    )
    for row in (0, 7, 15, 16, 17):
        expected = naive.round_block(rows[row], upper, slopes[..., row], lows[..., row], *levels)
        np.testing.assert_array_equal(codes[row].astype(int) + levels[0], expected[0])
        np.testing.assert_array_equal(choices[:, row], expected[1])
