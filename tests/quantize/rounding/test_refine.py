"""Complete rows get better with every sweep, and each step is what it says it is."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from quantize.formats.base import as_source
from quantize.rounding.base import MOST_STEPS, PANEL, Effort, Refiner
from quantize.rounding.factor import Factor
from quantize.rounding.feedback import encode_compensated
from quantize.rounding.judge import costs
from quantize.rounding.rounders import ROUNDERS
from quantize.rounding.scalar.rounder import Levels, Lines, Picks, ScalarGround, ScalarState, refine_blocks
from tests.naive import feedback as naive
from tests.quantize.codecs import decode, encode
from tests.quantize.rounding.moments import correlated, weights
from tests.quantize.rounding.test_rounders import type_named

N_COLS = 512
FACTOR = Factor.of(correlated(N_COLS))

REFINERS = [name for name, rounder in ROUNDERS.items() if isinstance(rounder, Refiner)]
every_refiner = pytest.mark.parametrize("name", REFINERS)


@every_refiner
def test_every_sweep_lowers_the_cost(name: str) -> None:
    rows = weights(20, N_COLS)
    by_sweeps = [
        costs(rows - decode(name, encode_compensated(rows, type_named(name), FACTOR, effort)), FACTOR)
        for effort in (Effort(sweeps=sweeps) for sweeps in (0, 1, 3))
    ]
    assert by_sweeps[1].sum() < 0.97 * by_sweeps[0].sum()
    for before, after in pairwise(by_sweeps):
        assert (after <= before * (1 + 1e-4)).all()


@every_refiner
@pytest.mark.parametrize("first", [0, 256])
def test_a_block_moves_where_that_costs_less(name: str, first: int) -> None:
    rows, refiner = weights(18, N_COLS), ROUNDERS[name]
    assert isinstance(refiner, Refiner)
    own = slice(first, first + PANEL)
    values = decode(name, encode(name, rows, np.diag(FACTOR.hessian).copy()))
    data = encode(name, rows[:, own], FACTOR.hessian.diagonal()[own].copy())
    values[:, own] = decode(name, data)
    pulls = ((rows - values).astype(float) @ FACTOR.hessian)[:, own].astype(np.float32)
    better, moves = refiner.refine_block(data, pulls, FACTOR.panel(first, first + PANEL), Effort())
    np.testing.assert_allclose(decode(name, better) - decode(name, data), moves, atol=1e-8)
    gains = 2 * (pulls * moves).sum(1) - ((moves @ FACTOR.hessian[own, own]) * moves).sum(1)
    assert (gains > 0).all()


def test_a_choice_is_that_of_the_twin() -> None:
    n, sub_elems, n_rows, n_candidates, padded = 64, 16, 18, 4, 32
    rng, levels = np.random.default_rng(2), np.arange(-4, 4, dtype=np.float32)
    factor = Factor.of(correlated(n))
    uppers = factor.local_uppers(sub_elems)
    values, pulls = weights(n_rows, n), weights(n_rows, n, 1)
    shape = (n // sub_elems, n_candidates, padded)
    slopes = rng.uniform(0.003, 0.01, shape).astype(np.float32)
    lows = rng.uniform(-0.002, 0.002, shape).astype(np.float32)
    moves, codes = np.empty_like(values), np.empty((n_rows, n), np.uint8)
    choices = np.empty((n // sub_elems, padded), np.int32)
    ours = pulls.copy()
    refine_blocks(
        ScalarGround(as_source(factor.hessian), as_source(uppers), n, sub_elems),
        ScalarState(as_source(values), ours.reshape(-1), moves.reshape(-1)),
        Levels.of(levels),
        Lines(as_source(slopes), as_source(lows), n_candidates, padded),
        Picks(codes.reshape(-1), choices.reshape(-1)),
    )
    stays = np.repeat(choices.T[:n_rows] < 0, sub_elems, axis=1)
    assert 0 < stays.mean() < 1
    for row in range(n_rows):
        expected = naive.refine_row(
            values[row], pulls[row], factor.hessian, uppers, slopes[..., row], lows[..., row], levels
        )
        np.testing.assert_array_equal(choices[:, row], expected.choices)
        np.testing.assert_array_equal(moves[row], expected.moves)
        np.testing.assert_array_equal(ours[row], expected.pulls)
        moved = ~stays[row]
        np.testing.assert_array_equal(codes[row][moved], np.array(expected.codes)[moved])


@pytest.mark.parametrize("n", [16, 32, 256])
def test_local_factors_are_those_of_the_moments_by_themselves(n: int) -> None:
    uppers = FACTOR.local_uppers(n)
    assert uppers.shape == (N_COLS, n)
    for start in (0, N_COLS - n):
        own = slice(start, start + n)
        upper, moments = uppers[own].astype(float), FACTOR.hessian[own, own].astype(float)
        assert (np.tril(upper, -1) == 0).all()
        np.testing.assert_allclose(upper @ moments @ upper.T, np.eye(n), atol=1e-5)


@pytest.mark.parametrize(("window", "sweeps"), [(-1, 0), (MOST_STEPS + 1, 0), (1, -1)])
def test_efforts_that_make_no_sense_are_refused(window: int, sweeps: int) -> None:
    with pytest.raises(ValueError, match="must be 0"):
        Effort(window, sweeps=sweeps)
