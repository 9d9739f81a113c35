"""What encodings cost, and which bytes are kept."""

from __future__ import annotations

import numpy as np
import pytest

from gguf_tools.format.ggml_types import Q4_0, Q4_K, by_name
from quantize.formats import get_format
from quantize.rounding.factor import Factor
from quantize.rounding.judge import choose_cheaper, costs
from quantize.rounding.methods.diagonal import encode_stock
from quantize.rounding.two_sided import OUTPUT_DAMP, OutputFactor, encode_side_by_side
from tests.quantize.codecs import decode, encode
from tests.quantize.rounding.judged import encode_judged
from tests.quantize.rounding.moments import correlated, weights

N_COLS = 768
FACTOR = Factor.of(correlated(N_COLS))
ROWS = weights(8, N_COLS)
FINE, ROUGH = encode(Q4_K, ROWS, None), encode(Q4_K, np.float32(0.9) * ROWS, None)
"""Bytes for ROWS, and such that cost more in every row."""


def of(choice: np.ndarray) -> list[str]:
    """Say whose bytes each row has."""
    same = {"fine": FINE, "rough": ROUGH}
    return [name for row in range(len(choice)) for name in same if (choice[row] == same[name][row]).all()]


@pytest.mark.parametrize("n_rows", [0, 1, 17])
def test_costs_are_those_of_the_moments(n_rows: int) -> None:
    errors = weights(n_rows, N_COLS) - weights(n_rows, N_COLS, seed=1)
    wide = errors.astype(float)
    expected = np.einsum("rc,rc->r", wide @ FACTOR.hessian.astype(float), wide)
    np.testing.assert_allclose(costs(errors, FACTOR), expected, rtol=1e-4)


def test_a_row_that_the_stock_encoder_does_better_keeps_its_bytes() -> None:
    rows = np.full((3, N_COLS), 0.37, np.float32)
    rows[1] = weights(1, N_COLS)
    stock, data = encode_stock(rows, Q4_K, FACTOR), encode_judged(rows, Q4_K, FACTOR)
    assert (data == stock).all(1).tolist() == [True, False, True]
    ours, theirs = (costs(rows - decode(Q4_K, each), FACTOR) for each in (data, stock))
    assert (ours <= theirs).all()


def test_each_row_has_the_cheaper_bytes() -> None:
    is_rough = np.arange(8) % 3 == 0
    data, stock = np.where(is_rough[:, None], ROUGH, FINE), np.where(is_rough[:, None], FINE, ROUGH)
    assert of(choose_cheaper(ROWS, data, stock, Q4_K, FACTOR)) == ["fine"] * 8


def test_stock_bytes_stay_at_the_same_cost() -> None:
    zeros = np.zeros((2, N_COLS), np.float32)
    stock = encode(Q4_0, zeros, None)
    other = stock.copy()
    other.reshape(2, -1, 18)[..., 2:] = 0
    assert (stock != other).any()
    assert not decode(Q4_0, other).any()
    np.testing.assert_array_equal(choose_cheaper(zeros, other, stock, Q4_0, FACTOR), stock)


def test_stock_bytes_stay_where_feedback_has_made_a_scale_infinite() -> None:
    data = FINE.copy()
    data[3, :2] = np.frombuffer(np.float16(np.inf).tobytes(), np.uint8)
    assert of(choose_cheaper(ROWS, data, ROUGH, Q4_K, FACTOR)) == [*["fine"] * 3, "rough", *["fine"] * 4]
    outputs = OutputFactor.of(correlated(8, seed=1))
    assert of(choose_cheaper(ROWS, data, ROUGH, Q4_K, FACTOR, outputs)) == ["rough"] * 8


def test_rows_whose_outputs_are_known_are_chosen_together() -> None:
    """By tr(G E H E^T), not by the sum of what each row costs."""
    sizes = np.array([1.0, 1, 1, 1, 1, 1, 1, 100])
    outputs = OutputFactor.of(np.diag(sizes))
    data = FINE.copy()
    data[7] = ROUGH[7]
    stock = ROUGH.copy()
    stock[7] = FINE[7]
    assert of(choose_cheaper(ROWS, data, stock, Q4_K, FACTOR, outputs)) == [*["rough"] * 7, "fine"]
    assert of(choose_cheaper(ROWS, stock, data, Q4_K, FACTOR, outputs)) == [*["rough"] * 7, "fine"]


@pytest.mark.parametrize("n_rows", [40, 300])
def test_damage_is_that_of_both_moments(n_rows: int) -> None:
    rows, factor = weights(n_rows, 256), Factor.of(correlated(256))
    moments = correlated(n_rows, seed=1)
    outputs = OutputFactor.of(moments)
    (data,) = encode_side_by_side([(rows, outputs)], Q4_K, factor)
    errors = rows - decode(Q4_K, data)
    left = Factor.of(moments, OUTPUT_DAMP).hessian.astype(float)
    expected = float((left @ errors.astype(float) @ factor.hessian * errors).sum())
    np.testing.assert_allclose(costs(outputs.whitened(errors), factor).sum(), expected, rtol=1e-3)


def test_rows_that_a_type_interleaves_are_chosen_together() -> None:
    type_ = by_name("Q4_K_R4")
    codec = get_format(type_)
    fine, rough = (codec.encode(rows, None) for rows in (ROWS, 2 * ROWS))
    data, stock = np.concatenate([fine[:4], rough[4:]]), np.concatenate([rough[:4], fine[4:]])
    np.testing.assert_array_equal(choose_cheaper(ROWS, data, stock, type_, FACTOR), fine)
    mixed = ROWS.copy()
    mixed[1] *= 2  # the group of four is better under `fine`, though one of its rows is not
    np.testing.assert_array_equal(choose_cheaper(mixed, rough, fine, type_, FACTOR), fine)
