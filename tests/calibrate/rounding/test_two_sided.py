"""Errors are carried on to later rows too."""

from __future__ import annotations

import numpy as np
import pytest

from calibrate.rounding.factor import Factor
from calibrate.rounding.feedback import encode_compensated
from calibrate.rounding.judge import encode_stock
from calibrate.rounding.two_sided import OUTPUT_DAMP, ROWS_AT_ONCE, encode_side_by_side
from gguf_tools.errors import ShapeError
from gguf_tools.format.ggml_types import IQ4_NL, Q2_K, Q4_K, GGMLType
from tests.calibrate.rounding.moments import correlated, weights
from tests.quantize.codecs import decode

N_COLS = 256
INPUTS = Factor.of(correlated(N_COLS))


def outputs(n_rows: int) -> Factor:
    return Factor.of(correlated(n_rows, seed=1), OUTPUT_DAMP)


def encode_two_sided(rows: np.ndarray, type_: GGMLType, factor: Factor, output_factor: Factor) -> np.ndarray:
    """Encode one matrix by itself."""
    return encode_side_by_side([(rows, output_factor)], type_, factor)[0]


def damage(rows: np.ndarray, values: np.ndarray, output_factor: Factor) -> float:
    """Return tr(G E H E^T)."""
    errors = rows.astype(float) - values
    return float(np.sum((output_factor.hessian @ errors) * (errors @ INPUTS.hessian.astype(float))))


@pytest.mark.parametrize("type_", [Q2_K, Q4_K, IQ4_NL], ids=str)
@pytest.mark.parametrize("n_rows", [80, 300])
def test_both_sides_do_less_damage_than_one(type_: GGMLType, n_rows: int) -> None:
    rows, output_factor = weights(n_rows, N_COLS), outputs(n_rows)
    one = decode(type_, encode_compensated(rows, type_, INPUTS))
    both = decode(type_, encode_two_sided(rows, type_, INPUTS, output_factor))
    assert damage(rows, both, output_factor) < 0.95 * damage(rows, one, output_factor)


@pytest.mark.parametrize("n_rows", [1, 16, 33])
def test_rows_whose_outputs_have_nothing_in_common_are_encoded_by_themselves(n_rows: int) -> None:
    rows = weights(n_rows, N_COLS)
    alone = Factor.of(np.diag(np.arange(1.0, n_rows + 1)), OUTPUT_DAMP)
    both = encode_two_sided(rows, Q4_K, INPUTS, alone)
    np.testing.assert_array_equal(both, encode_compensated(rows, Q4_K, INPUTS))


def test_errors_are_carried_on_as_the_conditional_mean() -> None:
    """The rows that are next get W - G_nn^-1 G_np E: the best answer to the errors E of the rows before."""
    n_rows = 3 * ROWS_AT_ONCE
    rows, output_factor = weights(n_rows, N_COLS), outputs(n_rows)
    moments = output_factor.hessian.astype(float)
    data = encode_two_sided(rows, Q4_K, INPUTS, output_factor)
    for first in range(ROWS_AT_ONCE, n_rows, ROWS_AT_ONCE):
        done = rows[:first].astype(float) - decode(Q4_K, data[:first])
        later = np.linalg.solve(moments[first:, first:], moments[first:, :first] @ done)
        wanted = (rows[first:] + later)[:ROWS_AT_ONCE].astype(np.float32)
        expected = decode(Q4_K, encode_compensated(wanted, Q4_K, INPUTS))
        ours = decode(Q4_K, data[first : first + ROWS_AT_ONCE])
        assert (expected == ours).mean() > 0.9  # a scale on the edge may go the other way


def test_matrices_side_by_side_get_the_bytes_that_each_gets_alone() -> None:
    matrices = [(weights(n_rows, N_COLS, seed=n_rows), outputs(n_rows)) for n_rows in (40, 16, 300)]
    together = encode_side_by_side(matrices, Q4_K, INPUTS)
    for data, (rows, output_factor) in zip(together, matrices, strict=True):
        np.testing.assert_array_equal(data, encode_two_sided(rows, Q4_K, INPUTS, output_factor))


def test_stock_bytes_that_are_given_are_not_made_again() -> None:
    matrices = [(weights(16, N_COLS, seed), outputs(16)) for seed in (0, 1)]
    stocks = [encode_stock(rows, Q4_K, INPUTS) for rows, _factor in matrices]
    given = encode_side_by_side(matrices, Q4_K, INPUTS, stocks=stocks)
    np.testing.assert_array_equal(given, encode_side_by_side(matrices, Q4_K, INPUTS))


def test_moments_of_other_outputs_are_refused() -> None:
    with pytest.raises(ShapeError, match="Q4_K: 8 rows, but second moments of the gradients of 9 outputs"):
        encode_two_sided(weights(8, N_COLS), Q4_K, INPUTS, outputs(9))
