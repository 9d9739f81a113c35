"""What the driver does around the rounders: costs, and the choice between its own and stock bytes."""

from __future__ import annotations

import numpy as np
import pytest

from gguf_tools.format.ggml_types import IQ2_XXS, Q4_K, GGMLType
from quantize.formats.base import as_source
from quantize.rounding.factor import Factor
from quantize.rounding.feedback import encode_compensated
from quantize.rounding.judge import costs, encode_stock, is_kept
from quantize.rounding.products import errors_of, feed_back
from tests.quantize.codecs import decode, encode
from tests.quantize.rounding.moments import correlated, weights

N_COLS = 768
FACTOR = Factor.of(correlated(N_COLS))


@pytest.mark.parametrize("n_rows", [0, 1, 17])
def test_costs_are_those_of_the_moments(n_rows: int) -> None:
    rows, values = weights(n_rows, N_COLS), weights(n_rows, N_COLS, seed=1)
    errors = rows.astype(float) - values
    expected = np.einsum("rc,rc->r", errors @ FACTOR.hessian.astype(float), errors)
    np.testing.assert_allclose(costs(rows, values, FACTOR), expected, rtol=1e-4)


def test_a_row_that_the_stock_encoder_does_better_keeps_its_bytes() -> None:
    rows = np.full((3, N_COLS), 0.37, np.float32)
    rows[1] = weights(1, N_COLS)
    stock = encode(Q4_K, rows, np.diag(FACTOR.hessian).copy())
    data = encode_compensated(rows, Q4_K, FACTOR)
    assert [bool((ours == theirs).all()) for ours, theirs in zip(data, stock, strict=True)] == [
        True,
        False,
        True,
    ]
    assert (costs(rows, decode(Q4_K, data), FACTOR) <= costs(rows, decode(Q4_K, stock), FACTOR)).all()


@pytest.mark.parametrize("type_", [Q4_K, IQ2_XXS])
def test_blocks_that_end_in_padding_are_rounded_for_their_weights_alone(type_: GGMLType) -> None:
    """Columns of zeros that count like others would make blocks worse that can't say both."""
    n_real, n_cols = 176, 256
    rows, moments = np.zeros((32, n_cols), np.float32), np.zeros((n_cols, n_cols))
    rows[:, :n_real], moments[:n_real, :n_real] = weights(32, n_real), correlated(n_real)
    real = Factor.of(moments[:n_real, :n_real])

    def cost(factor: Factor) -> float:
        values = decode(type_, encode_compensated(rows, type_, factor))
        return float(costs(rows[:, :n_real], values[:, :n_real], real).sum())

    assert cost(Factor.of(moments, n_real=n_real)) < 0.99 * cost(Factor.of(moments))


def test_padding_stays_zero_where_a_type_can_say_it() -> None:
    rows, moments = np.zeros((4, 256), np.float32), np.zeros((256, 256))
    rows[:, :192], moments[:192, :192] = weights(4, 192), correlated(192)
    values = decode(Q4_K, encode_compensated(rows, Q4_K, Factor.of(moments, n_real=192)))
    assert not values[:, 192:].any()


def test_stock_bytes_that_are_given_are_not_made_again() -> None:
    rows = np.full((3, N_COLS), 0.37, np.float32)
    rows[1] = weights(1, N_COLS)
    stock, ours = encode_stock(rows, Q4_K, FACTOR), encode_compensated(rows, Q4_K, FACTOR)
    np.testing.assert_array_equal(encode_compensated(rows, Q4_K, FACTOR, stock=stock), ours)
    without = encode_compensated(rows, Q4_K, FACTOR, stock=np.zeros_like(stock))
    assert [bool((a == b).all()) for a, b in zip(without, ours, strict=True)] == [False, True, False]


def test_feedback_is_kept_where_it_costs_less() -> None:
    ours, stock = np.array([1.0, 2.0, 3.0, np.nan]), np.full(4, 2.0)
    assert is_kept(ours, stock, at_equal_cost=False).tolist() == [True, False, False, False]
    assert is_kept(ours, stock, at_equal_cost=True).tolist() == [True, True, False, False]
    assert not is_kept(float("nan"), 1.0, at_equal_cost=True)


@pytest.mark.parametrize("n_rows", [1, 4, 7])
@pytest.mark.parametrize(
    ("first", "n_errors", "later", "stop"),
    [(0, 256, 256, 768), (64, 32, 96, 256), (0, 32, 32, 32), (16, 16, 32, 112), (0, 16, 16, 32)],
)
def test_errors_are_fed_to_the_columns_named_and_to_no_others(
    n_rows: int, first: int, n_errors: int, later: int, stop: int
) -> None:
    errors, work = weights(n_rows, n_errors), weights(n_rows, N_COLS)
    expected = work.astype(float)
    expected[:, later:stop] -= errors.astype(float) @ FACTOR.upper[first : first + n_errors, later:stop]
    feed_back(as_source(errors), n_errors, as_source(FACTOR.upper), first, later, stop, work.reshape(-1))
    np.testing.assert_allclose(work, expected, atol=1e-7)


@pytest.mark.parametrize("n", [32, 64, 256])
def test_errors_make_up_for_the_moves(n: int) -> None:
    moves, upper = weights(19, n), np.ascontiguousarray(FACTOR.upper[:n, :n])
    errors = np.empty_like(moves)
    errors_of(as_source(moves), as_source(upper), n, errors.reshape(-1))
    np.testing.assert_allclose(errors.astype(float) @ upper, moves, atol=1e-7)
