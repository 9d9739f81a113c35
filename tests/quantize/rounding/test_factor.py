"""Moments become what rounding reads, or are refused with what is wrong about them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from gguf_tools.errors import BadMoments
from quantize.rounding.factor import Factor, damped_inverse
from tests.quantize.rounding.moments import correlated


@pytest.mark.parametrize("n", [1, 2, 96, 300, pytest.param(1500, marks=pytest.mark.slow)])
def test_the_upper_factor_is_that_of_the_inverse(n: int) -> None:
    factor = Factor.of(correlated(n), damp=0.02)
    hessian, upper = factor.hessian.astype(float), factor.upper.astype(float)
    assert np.diag(hessian).mean() == pytest.approx(1.02)
    assert (np.tril(upper, -1) == 0).all()
    np.testing.assert_allclose(upper @ hessian @ upper.T, np.eye(n), atol=2e-6)
    np.testing.assert_allclose(factor.importances, (c := np.diag(upper) ** -2) / c.mean(), rtol=1e-6)
    assert {a.dtype for a in (factor.hessian, factor.upper, factor.importances)} == {np.dtype(np.float32)}
    assert factor.size == n


@pytest.mark.parametrize("n", [1, 300, pytest.param(1500, marks=pytest.mark.slow)])
def test_the_inverse_is_the_product_of_its_roots(n: int) -> None:
    inverse, mean = damped_inverse(correlated(n), 0.3)
    damped = correlated(n) / mean + 0.3 * np.eye(n)
    np.testing.assert_allclose(inverse @ damped, np.eye(n), atol=2e-5)
    np.testing.assert_allclose(inverse, inverse.T, atol=1e-6)


def test_threads_change_no_digit() -> None:
    moments = correlated(1500)
    with ThreadPoolExecutor(3) as threads:
        one, other = Factor.of(moments), Factor.of(moments, each=threads.map)
        np.testing.assert_array_equal(one.upper, other.upper)
        first, second = damped_inverse(moments, 0.3), damped_inverse(moments, 0.3, threads.map)
        np.testing.assert_array_equal(first[0], second[0])


def test_the_unit_of_moments_does_not_count() -> None:
    moments = correlated(40)
    one, other = Factor.of(moments), Factor.of(moments * 2.0**40)
    np.testing.assert_array_equal(one.upper, other.upper)
    np.testing.assert_array_equal(one.hessian, other.hessian)


def test_the_cost_of_a_row_is_the_sum_of_its_squared_errors_after_feedback() -> None:
    factor = Factor.of(correlated(64))
    moves = np.random.default_rng(1).standard_normal(64)
    errors = np.linalg.solve(factor.upper.T.astype(float), moves)
    assert (errors**2).sum() == pytest.approx(moves @ factor.hessian.astype(float) @ moves, rel=1e-4)


def test_a_panel_is_the_factor_of_some_columns() -> None:
    factor = Factor.of(correlated(96))
    panel, own = factor.panel(32, 64), slice(32, 64)
    np.testing.assert_array_equal(panel.upper, factor.upper[own, own])
    np.testing.assert_array_equal(panel.hessian, factor.hessian[own, own])
    np.testing.assert_array_equal(panel.importances, factor.importances[own])
    np.testing.assert_array_equal(panel.local_uppers(16), factor.local_uppers(16)[own])
    assert panel.upper.flags.c_contiguous
    assert panel.hessian.flags.c_contiguous


def test_a_dead_column_counts_as_the_mean_of_the_others() -> None:
    moments = correlated(48)
    moments[:, 7] = moments[7] = 0
    factor = Factor.of(moments, damp=0.01)
    assert factor.hessian[7, 7] == pytest.approx(1.01)
    assert np.count_nonzero(factor.hessian[7]) == 1
    assert np.isfinite(factor.upper).all()


def test_columns_that_are_all_dead_count_alike() -> None:
    factor = Factor.of(np.zeros((32, 32)))
    np.testing.assert_allclose(factor.importances, 1)


def test_padding_costs_next_to_nothing_and_changes_no_other_column() -> None:
    padded = np.zeros((64, 64))
    padded[:48, :48] = correlated(48)
    alone, factor = Factor.of(correlated(48)), Factor.of(padded, n_real=48)
    np.testing.assert_allclose(factor.upper[:48, :48], alone.upper, rtol=1e-5)
    np.testing.assert_allclose(factor.importances[:48], alone.importances, rtol=1e-5)
    np.testing.assert_allclose(factor.importances[48:], 0, atol=1e-4)
    assert factor.mean == alone.mean
    np.testing.assert_array_equal(factor.upper[:48, 48:], 0)


def test_what_is_not_zero_is_no_padding() -> None:
    moments = correlated(48)
    np.testing.assert_array_equal(Factor.of(moments, n_real=40).upper, Factor.of(moments).upper)


@pytest.mark.parametrize(
    ("moments", "message"),
    [
        (np.zeros((2, 3)), r"square matrix, found shape \(2, 3\)"),
        (np.diag([1.0, np.nan]), "columns 1 and 1 are nan"),
        (np.array([[1.0, np.inf], [np.inf, 1.0]]), "columns 0 and 1 are inf"),
        (np.diag([1.0, -2.0]), r"column 1 is -2\.0, below 0"),
        (np.array([[1.0, 3.0], [3.0, 1.0]]), "not positive definite"),
    ],
)
def test_what_is_no_covariance_is_refused(moments: np.ndarray, message: str) -> None:
    with pytest.raises(BadMoments, match=message):
        Factor.of(moments)


def test_moments_are_left_as_they_are() -> None:
    moments = correlated(32)
    before = moments.copy()
    Factor.of(moments)
    np.testing.assert_array_equal(moments, before)
