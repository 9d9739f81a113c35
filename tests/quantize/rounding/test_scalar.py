"""Layouts are read and written without a change, kernels decide as their twin does, scales are fitted."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from quantize.formats.base import as_source
from quantize.formats.iq import iq4_search
from quantize.rounding.base import Effort
from quantize.rounding.factor import Factor
from quantize.rounding.feedback import encode_compensated
from quantize.rounding.judge import costs
from quantize.rounding.scalar.blocks import ScalarLayout, chosen
from quantize.rounding.scalar.layouts import FP4_LEVELS, LAYOUTS, SUPER_BLOCKS, SuperBlocks
from quantize.rounding.scalar.rounder import Levels, Lines, Picks, refit, round_blocks
from tests.naive import feedback as naive
from tests.quantize.codecs import decode, encode
from tests.quantize.rounding.moments import correlated, weights

every_layout = pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.type.name)


def random_blocks(layout: ScalarLayout, n: int) -> np.ndarray:
    """Return blocks of random bytes whose floats are finite; where not all bytes are codes, encoded ones."""
    if layout.type.name in ("TQ1_0", "TQ2_0", "MXFP4", "NVFP4"):
        return encode(layout.type, weights(n, layout.type.block_elems), None)
    data = np.random.default_rng(0).integers(0, 256, (4 * n, layout.type.block_bytes), np.uint8)
    with np.errstate(all="ignore"):
        finite = np.isfinite(decode(layout.type, data)).all(1)
    assert finite.sum() >= n
    return data[finite][:n]


@every_layout
def test_blocks_are_read_and_written_without_a_change(layout: ScalarLayout) -> None:
    data = random_blocks(layout, 50)
    np.testing.assert_array_equal(layout.write(layout.read(data)), data)


@every_layout
def test_lines_give_the_values_that_the_decoder_gives(layout: ScalarLayout) -> None:
    data = random_blocks(layout, 50)
    blocks = layout.read(data)
    slopes, lows = (np.repeat(line, layout.sub_elems, axis=1) for line in layout.lines(blocks))
    np.testing.assert_array_equal(slopes * layout.levels[blocks.codes] - lows, decode(layout.type, data))


@every_layout
def test_neighbours_can_be_stored(layout: ScalarLayout) -> None:
    blocks = layout.read(random_blocks(layout, 20))
    neighbours = layout.neighbours(blocks, 2)
    n_candidates = max(len(neighbours.d), len(neighbours.scales))
    assert n_candidates > 4
    assert n_candidates % 2 == 0
    for number in range(n_candidates):
        neighbour = chosen(neighbours, np.full_like(blocks.scales, number), blocks.codes)
        stored = layout.read(layout.write(neighbour))
        for field in ("d", "dmin", "scales", "lows", "codes"):
            np.testing.assert_array_equal(getattr(stored, field), getattr(neighbour, field))
            if number == 0:
                np.testing.assert_array_equal(getattr(neighbour, field), getattr(blocks, field))


@pytest.mark.parametrize(
    ("n", "sub_elems", "levels"),
    [
        (256, 16, range(4)),
        (256, 32, range(-4, 4)),
        (32, 32, range(16)),
        (256, 256, range(-1, 2)),
        (64, 16, FP4_LEVELS),
        (32, 32, iq4_search.LEVELS),
    ],
    ids=str,
)
def test_the_kernels_decide_as_their_twin(n: int, sub_elems: int, levels: Sequence[float]) -> None:
    n_rows, n_candidates, padded = 18, 4, 32
    rows, rng = weights(n_rows, n), np.random.default_rng(5)
    upper = Factor.of(correlated(n)).upper
    shape = (n // sub_elems, n_candidates, padded)
    table = np.array(levels, np.float32)
    slopes = (0.06 / np.ptp(table) * rng.uniform(0.5, 1.5, shape)).astype(np.float32)
    slopes[0, 1] = 0
    lows = rng.uniform(0, 0.04, shape).astype(np.float32)
    codes, choices = np.empty((n_rows, n), np.uint8), np.empty((n // sub_elems, padded), np.int32)
    lines = Lines(as_source(slopes), as_source(lows), n_candidates, padded)
    picks = Picks(codes.reshape(-1), choices.reshape(-1))
    round_blocks(as_source(rows), as_source(upper), n, sub_elems, Levels.of(table), lines, picks)
    for row in (0, 7, 15, 16, 17):
        expected = naive.round_block(rows[row], upper, slopes[..., row], lows[..., row], table)
        np.testing.assert_array_equal(codes[row], expected[0])
        np.testing.assert_array_equal(choices[:, row], expected[1])


@pytest.mark.parametrize("name", ["Q2_K", "Q3_K", "Q4_K", "Q4_0", "NVFP4", "TQ2_0"])
def test_a_search_of_scales_pays(name: str) -> None:
    rows, factor = weights(32, 512), Factor.of(correlated(512))
    type_ = next(layout.type for layout in LAYOUTS if layout.type.name == name)
    with_window, without = (
        costs(
            rows - decode(name, encode_compensated(rows, type_, factor, Effort(window, sweeps=0))), factor
        ).sum()
        for window in (1, 0)
    )
    assert with_window < 0.99 * without


HESSIAN = Factor.of(correlated(256)).hessian


def cost(errors: np.ndarray) -> np.ndarray:
    return np.einsum("rc,rc->r", errors @ HESSIAN.astype(float), errors)


@pytest.mark.parametrize("layout", SUPER_BLOCKS, ids=lambda layout: layout.type.name)
def test_the_fit_is_the_best_there_is(layout: SuperBlocks) -> None:
    """As good as least squares by numpy, but for the rounding to float16."""
    rows = weights(20, 256)
    blocks = layout.read(encode(layout.type, rows, None))
    before = rows.astype(float) - decode(layout.type, layout.write(blocks))
    fitted = refit(layout, blocks, (before @ HESSIAN).astype(np.float32), HESSIAN)
    after = rows.astype(float) - decode(layout.type, layout.write(fitted))
    assert (cost(after) <= cost(before) * (1 + 1e-6)).all()
    assert cost(after).sum() < 0.999 * cost(before).sum()
    root = np.linalg.cholesky(HESSIAN.astype(float))
    for row, error in zip(range(20), after, strict=True):
        rise = np.repeat(blocks.scales[row], layout.sub_elems) * layout.levels[blocks.codes[row]]
        basis = [rise, np.repeat(blocks.lows[row], layout.sub_elems)] if layout.low_top else [rise]
        design, target = np.stack(basis, axis=1).T.astype(float) @ root, rows[row].astype(float) @ root
        best = np.linalg.lstsq(design.T, target, rcond=None)[1]
        assert cost(error[None])[0] <= best[0] * 1.02


def test_scales_that_fit_already_stay() -> None:
    layout = SUPER_BLOCKS[0]
    blocks = layout.read(encode(layout.type, weights(5, 256), None))
    fitted = refit(layout, blocks, np.zeros((5, 256), np.float32), HESSIAN)
    np.testing.assert_array_equal(layout.write(fitted), layout.write(blocks))
