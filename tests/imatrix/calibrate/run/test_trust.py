"""How much covariances of gradients are damped for their noise."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import pytest

from imatrix.calibrate.statistics.conditions import Trust, noise_damp
from quantize.rounding.two_sided import OUTPUT_DAMP

Rows = npt.NDArray[np.float64]


def sums(rows: Rows) -> tuple[Rows, float, float]:
    return rows.T @ rows, float((np.square(rows).sum(axis=1) ** 2).sum()), len(rows)


def draw(n_tokens: int, n_directions: int, tails: float = 0.0) -> Rows:
    """Draw gradients at 24 outputs, strong in some of them, whose sizes differ more with `tails`."""
    rng = np.random.default_rng(5)
    rows = rng.standard_normal((n_tokens, 24))
    rows[:, n_directions:] *= 0.05
    return rows * np.exp(tails * rng.standard_normal((n_tokens, 1)))


@pytest.mark.parametrize("tails", [0.0, 1.0])
def test_damping_is_the_share_of_noise_token_by_token(tails: float) -> None:
    rows = draw(200, 6, tails)
    mean = rows.T @ rows / len(rows)
    target = np.trace(mean) / len(mean) * np.eye(len(mean))
    noise = sum(np.square(np.outer(row, row) - mean).sum() for row in rows) / len(rows) ** 2
    share = 2 * noise / np.square(mean - target).sum()  # tokens of a chunk are alike
    assert share < 1
    assert noise_damp(*sums(rows)) == pytest.approx(share / (1 - share))


def test_damping_falls_with_tokens_and_rises_with_heavy_tails() -> None:
    by_tokens = [noise_damp(*sums(draw(n, 4))) for n in (50, 500, 5000)]
    assert by_tokens == sorted(by_tokens, reverse=True)
    assert noise_damp(*sums(draw(5000, 4, tails=1.5))) > 5 * by_tokens[-1]


def test_it_stays_within_bounds() -> None:
    noise, known = sums(draw(20, 24)), sums(draw(50000, 2))
    assert Trust().output_damp(*noise) == Trust(False).output_damp(*noise) == 10
    assert Trust().output_damp(*known) == OUTPUT_DAMP
    assert Trust(False).output_damp(*known) == 0.5
    assert Trust().output_damp(np.zeros((3, 3)), 0.0, 10) == 10


def test_what_no_token_has_reached_is_all_noise() -> None:
    """As with experts that a monotonous text never chooses."""
    assert noise_damp(np.zeros((3, 3)), 0.0, 0) == math.inf
    assert (
        Trust().output_damp(np.zeros((3, 3)), 0.0, 0)
        == Trust(False).output_damp(np.zeros((3, 3)), 0.0, 0)
        == 10
    )


def test_outputs_of_padding_count_for_nothing() -> None:
    rows = draw(300, 6)
    assert noise_damp(*sums(np.pad(rows, ((0, 0), (0, 40))))) == pytest.approx(noise_damp(*sums(rows)))
