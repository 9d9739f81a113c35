"""Errors are carried on to later rows too."""

from __future__ import annotations

import numpy as np
import pytest

from gguf_tools.errors import ShapeError
from gguf_tools.format.ggml_types import IQ4_NL, Q2_K, Q4_K, GGMLType
from quantize.rounding.factor import Factor
from quantize.rounding.feedback import encode_compensated
from quantize.rounding.two_sided import OUTPUT_DAMP, OutputFactor, encode_side_by_side, rows_at_once
from tests.quantize.codecs import decode
from tests.quantize.rounding.moments import correlated, weights

N_COLS = 256
INPUTS = Factor.of(correlated(N_COLS))


def outputs(n_rows: int) -> OutputFactor:
    return OutputFactor.of(correlated(n_rows, seed=1))


def damped(n_rows: int) -> np.ndarray:
    """Return the moments of `outputs`, float64 (n_rows, n_rows)."""
    return Factor.of(correlated(n_rows, seed=1), OUTPUT_DAMP).hessian.astype(float)


def encode_two_sided(
    rows: np.ndarray, type_: GGMLType, factor: Factor, output_factor: OutputFactor
) -> np.ndarray:
    """Encode one matrix by itself."""
    return encode_side_by_side([(rows, output_factor)], type_, factor)[0]


def damage(rows: np.ndarray, values: np.ndarray, moments: np.ndarray) -> float:
    """Return tr(G E H E^T)."""
    errors = rows.astype(float) - values
    return float(np.sum((moments @ errors) * (errors @ INPUTS.hessian.astype(float))))


@pytest.mark.parametrize("type_", [Q2_K, Q4_K, IQ4_NL], ids=str)
@pytest.mark.parametrize("n_rows", [80, 300])
def test_both_sides_do_less_damage_than_one(type_: GGMLType, n_rows: int) -> None:
    rows, moments = weights(n_rows, N_COLS), damped(n_rows)
    one = decode(type_, encode_compensated(rows, type_, INPUTS))
    both = decode(type_, encode_two_sided(rows, type_, INPUTS, outputs(n_rows)))
    assert damage(rows, both, moments) < 0.95 * damage(rows, one, moments)


@pytest.mark.parametrize("n_rows", [64, 272])
def test_rows_with_the_largest_gradients_come_first(n_rows: int) -> None:
    """Later rows make up for earlier ones, and nothing makes up for the last."""
    sizes = np.random.RandomState(2).permutation(np.geomspace(0.1, 10, n_rows))
    moments = correlated(n_rows, seed=1) * np.outer(sizes, sizes)
    rows, ours, last = weights(n_rows, N_COLS), OutputFactor.of(moments), np.argsort(np.diagonal(moments))
    assert (np.diff(np.diagonal(moments)[ours.order]) <= 0).all()
    theirs = OutputFactor(last, Factor.of(moments[np.ix_(last, last)], OUTPUT_DAMP).upper)
    done = [decode(Q2_K, encode_two_sided(rows, Q2_K, INPUTS, each)) for each in (ours, theirs)]
    first, second = (damage(rows, values, Factor.of(moments, OUTPUT_DAMP).hessian) for values in done)
    assert first < 0.9 * second


@pytest.mark.parametrize("n_rows", [1, 16, 33])
def test_rows_whose_outputs_have_nothing_in_common_are_encoded_by_themselves(n_rows: int) -> None:
    rows = weights(n_rows, N_COLS)
    alone = OutputFactor.of(np.diag(np.arange(1.0, n_rows + 1)))
    both = encode_two_sided(rows, Q4_K, INPUTS, alone)
    np.testing.assert_array_equal(both, encode_compensated(rows, Q4_K, INPUTS))


@pytest.mark.parametrize("n_rows", [48, 300])
def test_errors_are_carried_on_as_the_conditional_mean(n_rows: int) -> None:
    """The rows that are next get W - G_nn^-1 G_np E: the best answer to the errors E of the rows before."""
    output_factor, n_at_once = outputs(n_rows), rows_at_once(n_rows)
    order = output_factor.order
    moments = damped(n_rows)[np.ix_(order, order)]
    rows = weights(n_rows, N_COLS)
    data = encode_two_sided(rows, Q4_K, INPUTS, output_factor)
    rows, data, same = rows[order], data[order], []
    for first in range(n_at_once, n_rows, n_at_once):
        done = rows[:first].astype(float) - decode(Q4_K, data[:first])
        later = np.linalg.solve(moments[first:, first:], moments[first:, :first] @ done)
        wanted = (rows[first:] + later)[:n_at_once].astype(np.float32)
        expected = decode(Q4_K, encode_compensated(wanted, Q4_K, INPUTS))
        ours = decode(Q4_K, data[first : first + n_at_once])
        same.append((expected == ours).mean())
    # One row of 50 has a scale on the edge, which the last digits decide. If what is carried on were 2 % off,
    # a tenth of all weights would be the same, and none of some steps.
    assert np.mean(same) > 0.9
    assert min(same) > 0.4, "more than two rows of four"


def test_matrices_side_by_side_get_the_bytes_that_each_gets_alone() -> None:
    matrices = [(weights(n_rows, N_COLS, seed=n_rows), outputs(n_rows)) for n_rows in (40, 16, 300)]
    together = encode_side_by_side(matrices, Q4_K, INPUTS)
    for data, (rows, output_factor) in zip(together, matrices, strict=True):
        np.testing.assert_array_equal(data, encode_two_sided(rows, Q4_K, INPUTS, output_factor))


def test_moments_of_other_outputs_are_refused() -> None:
    with pytest.raises(ShapeError, match="Q4_K: 8 rows, but second moments of the gradients of 9 outputs"):
        encode_two_sided(weights(8, N_COLS), Q4_K, INPUTS, outputs(9))
