"""Ratios of calibrated to stock damage, on inputs whose correlation is known.

Inputs and gradients are small whole numbers, so sums over them are exact in any order. With others the last
digits of the moments would depend on the processor, and rounding is chaotic: ratios differed by up to 10 %.
"""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from gguf_tools import TensorInfo  # noqa: E402
from gguf_tools.format.ggml_types import F32, Q3_K  # noqa: E402
from imatrix.sensitivities.observe import Ratios, Together, ratio, ratios_of, type_for  # noqa: E402
from imatrix.sensitivities.type_errors import RowLengths  # noqa: E402

N_COLS, N_ROWS, CHUNK = 256, 40, 128
WEIGHTS = np.random.default_rng(6).standard_normal((N_ROWS, N_COLS)).astype(np.float32)


def whole_numbers(*shape: int, most: int, seed: int) -> np.ndarray:
    """Return whole numbers from -most to most, float32."""
    return np.random.default_rng(seed).integers(-most, most + 1, shape).astype(np.float32)


MIX = whole_numbers(24, N_COLS, most=3, seed=7)


def inputs(n_tokens: int, correlated: bool, seed: int = 0) -> np.ndarray:
    noise = whole_numbers(n_tokens, N_COLS, most=1, seed=seed)
    return whole_numbers(n_tokens, 24, most=1, seed=seed + 1) @ MIX + noise if correlated else noise


def gradients(*shape: int) -> torch.Tensor:
    return torch.from_numpy(whole_numbers(*shape, most=4, seed=8))


def measured(correlated: bool) -> float:
    x, other = inputs(4000, correlated), inputs(4000, correlated, seed=2)
    moments = (x.T @ x).astype(np.float64)
    return ratio(WEIGHTS, moments, lambda errors: float(np.square(other @ errors.T).sum()), Q3_K, N_COLS)


def test_correlated_inputs_leave_less() -> None:
    assert 0.01 < measured(correlated=True) < 0.5
    assert 0.75 < measured(correlated=False) <= 1


def test_moments_that_are_none_leave_all() -> None:
    assert ratio(WEIGHTS, np.full((N_COLS, N_COLS), np.nan), lambda errors: 1.0, Q3_K, N_COLS) == 1


def test_rows_without_a_type_have_no_ratio() -> None:
    assert type_for(512) == Q3_K
    assert type_for(48) is None
    assert type_for(16384) is None


class Stored:
    """A tensor in memory."""

    name, type = "blk.0.attn_output.weight", F32

    def __init__(self, weights: np.ndarray = WEIGHTS) -> None:
        self.weights, self.shape = weights, weights.shape

    def read_rows(self, start: int, stop: int) -> np.ndarray:
        return self.weights[start:stop]


def test_rows_that_no_type_fits_have_the_ratio_of_padded_ones() -> None:
    name, n_real = Stored.name, 176
    x = inputs(6 * CHUNK, correlated=True)[:, :n_real]
    g = gradients(6 * CHUNK, 1, N_ROWS)
    found = []
    for n_cols, lengths in (
        (n_real, RowLengths()),
        (n_real, RowLengths(padded={name: N_COLS})),
        (N_COLS, RowLengths(real={name: n_real})),
    ):
        behind = ((0, 0), (0, n_cols - n_real))
        one = Ratios({name: Stored(np.pad(WEIGHTS[:, :n_real], behind))}, CHUNK, lengths)
        one.tokens(torch.arange(6 * CHUNK))
        one.gradient(name, 0, 1, torch.from_numpy(np.pad(x, behind))[:, None], g)
        found.append(ratios_of(one.arrays()))
    assert found[0] == {}
    assert 0.01 < found[1][name] < 0.9
    assert found[2] == found[1]


def test_the_observer_separates_chunks_and_takes_them_in_parts() -> None:
    """Moments come from even chunks and gradients from odd ones, in one call or in several."""
    assert TensorInfo(Stored.name, Stored().shape, Stored.type).n_rows == N_ROWS
    x = torch.from_numpy(inputs(6 * CHUNK, correlated=True))
    g = gradients(6 * CHUNK, N_ROWS)
    found = []
    for step in (CHUNK, CHUNK // 2):
        whole = Together([Ratios({Stored.name: Stored()}, CHUNK)])
        for chunk in range(6):
            one = whole.fresh()
            one.tokens(torch.arange(chunk * CHUNK, (chunk + 1) * CHUNK))
            for start in range(chunk * CHUNK, (chunk + 1) * CHUNK, step):
                rows = slice(start, start + step)
                one.gradient(Stored.name, 0, 1, x[rows, None], g[rows, None])
            whole.merge(one)
        found.append(ratios_of(whole.arrays())[Stored.name])
    assert found[0] == found[1]
    chunks = [slice(chunk * CHUNK, (chunk + 1) * CHUNK) for chunk in range(6)]
    even = torch.cat([x[rows] for rows in chunks[::2]]).numpy()
    sampled = (2 * np.arange(32) + 1) * N_ROWS // 64
    products = [(g[rows][:, sampled].T @ x[rows]).numpy() for rows in chunks[1::2]]

    def sensitivity(errors: np.ndarray) -> float:
        return float(sum(np.square((errors * each).sum(-1)).sum() for each in products))

    expected = ratio(WEIGHTS[sampled], (even.T @ even).astype(np.float64), sensitivity, Q3_K, N_COLS)
    assert found[0] == pytest.approx(expected, rel=1e-5)
    assert 0.01 < found[0] < 0.9
