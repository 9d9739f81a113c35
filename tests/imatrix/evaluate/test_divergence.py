"""Measures of per-token values, against the plainest formulas and what llama-perplexity prints."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from imatrix.evaluate.divergence import TokenValues, mean_of, measure
from tests.imatrix.evaluate.token_values import token_values

N_CHUNKS, N_POSITIONS = 12, 255


def some_tokens(seed: int = 1, noise: float = 0.1) -> TokenValues:
    rng = np.random.default_rng(seed)
    shape = N_CHUNKS, N_POSITIONS
    base = -rng.exponential(3, shape)
    model = np.minimum(base + noise * rng.standard_normal(shape), 0)
    return token_values(base, model, rng.exponential(0.01, shape), rng.random(shape) < 0.9, first=256)


def test_perplexities_and_their_errors() -> None:
    tokens = some_tokens()
    found = measure(tokens)
    losses, base = -tokens.log_prob.ravel(), -tokens.base_log_prob.ravel()
    n = losses.size
    assert found.ppl.value == pytest.approx(math.exp(losses.mean()))
    assert found.base_ppl.value == pytest.approx(math.exp(base.mean()))
    variance = (losses**2).mean() - losses.mean() ** 2
    assert found.ppl.error == pytest.approx(math.sqrt(variance / (n - 1)) * found.ppl.value)
    assert found.correlation == pytest.approx(np.corrcoef(losses, base)[0, 1])
    assert found.ln_ratio.value == pytest.approx(math.log(found.ppl.value / found.base_ppl.value))
    assert found.ln_ratio.error == pytest.approx((losses - base).std() / math.sqrt(n - 1))
    assert found.ratio.value == pytest.approx(found.ppl.value / found.base_ppl.value)
    assert found.difference.value == pytest.approx(found.ppl.value - found.base_ppl.value)


def test_percentiles_lie_between_the_nearest_tokens() -> None:
    tokens = some_tokens()
    found = measure(tokens).kld
    ordered = np.sort(tokens.kld.ravel())
    for name, share in (("median", 0.5), ("p90", 0.9), ("p99", 0.99), ("p99_9", 0.999)):
        place = share * (ordered.size - 1)
        below = int(place)
        expected = ordered[below] + (place - below) * (ordered[below + 1] - ordered[below])
        assert found.percentiles[name] == pytest.approx(expected)
    assert (found.percentiles["min"], found.percentiles["max"]) == (ordered[0], ordered[-1])
    assert found.mean == mean_of(tokens.kld.ravel())


def test_the_change_of_the_right_tokens_probability() -> None:
    tokens = some_tokens()
    found = measure(tokens)
    delta = (np.exp(tokens.log_prob) - np.exp(tokens.base_log_prob)).ravel()
    rms = math.sqrt((delta**2).mean())
    assert found.delta_p.mean.value == pytest.approx(delta.mean())
    assert found.delta_p.percentiles["p25"] == pytest.approx(np.percentile(delta, 25))
    assert found.rms_delta_p.value == pytest.approx(rms)
    error = (delta**2).std() / math.sqrt(delta.size - 1)
    assert found.rms_delta_p.error == pytest.approx(error / (2 * rms))


def test_the_error_of_a_share_is_llama_perplexitys() -> None:
    """It prints `Same top p: 94.248 ± 0.421 %` for 2884 of 3060 tokens."""
    tokens = some_tokens()
    top = (np.arange(N_CHUNKS * N_POSITIONS) >= 2884).astype(np.int64)
    found = measure(replace(tokens, top=top)).same_top
    assert f"{100 * found.value:.3f} ± {100 * found.error:.3f} %" == "94.248 ± 0.421 %"


def test_equal_models_differ_by_nothing() -> None:
    tokens = some_tokens()
    zero = np.zeros_like(tokens.kld)
    found = measure(replace(tokens, log_prob=tokens.base_log_prob, kld=zero, top=tokens.base_top))
    for estimate in (found.ln_ratio, found.difference, found.kld.mean, found.delta_p.mean, found.rms_delta_p):
        assert (estimate.value, estimate.error) == (0, 0)
    assert found.ratio.value == found.same_top.value == found.correlation == 1


def test_positions_are_divided_into_buckets() -> None:
    tokens = some_tokens()
    buckets = measure(tokens, n_buckets=4).by_position
    assert [(bucket.first, bucket.last) for bucket in buckets] == [
        (256, 319), (320, 383), (384, 447), (448, 510),
    ]  # fmt: skip
    assert buckets[1].kld.value == pytest.approx(tokens.kld.reshape(N_CHUNKS, -1)[:, 64:128].mean())


def test_a_single_token_has_no_error() -> None:
    one = np.array([[-1.0]])
    found = measure(token_values(one, one, np.array([[0.0]]), np.array([[True]])))
    assert found.ppl.value == pytest.approx(math.e)
    assert math.isnan(found.ppl.error)
    assert math.isnan(found.same_top.error)
