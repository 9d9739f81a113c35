"""What the driver does around the rounders: padding, and errors that go from some columns to others."""

from __future__ import annotations

import numpy as np
import pytest

from gguf_tools.format.ggml_types import IQ2_XXS, Q4_K, GGMLType
from quantize.formats.base import as_source
from quantize.rounding.factor import Factor
from quantize.rounding.feedback import encode_compensated
from quantize.rounding.judge import costs
from quantize.rounding.products import errors_of, feed_back, pull
from tests.quantize.codecs import decode
from tests.quantize.rounding.moments import correlated, weights

N_COLS = 768
FACTOR = Factor.of(correlated(N_COLS))


@pytest.mark.parametrize("type_", [Q4_K, IQ2_XXS])
def test_blocks_that_end_in_padding_are_rounded_for_their_weights_alone(type_: GGMLType) -> None:
    """Columns of zeros that count like others would make blocks worse that can't say both."""
    n_real, n_cols = 176, 256
    rows, moments = np.zeros((32, n_cols), np.float32), np.zeros((n_cols, n_cols))
    rows[:, :n_real], moments[:n_real, :n_real] = weights(32, n_real), correlated(n_real)
    real = Factor.of(moments[:n_real, :n_real])

    def cost(factor: Factor) -> float:
        values = decode(type_, encode_compensated(rows, type_, factor))
        return float(costs(rows[:, :n_real] - values[:, :n_real], real).sum())

    assert cost(Factor.of(moments, n_real=n_real)) < 0.99 * cost(Factor.of(moments))


def test_padding_stays_zero_where_a_type_can_say_it() -> None:
    rows, moments = np.zeros((4, 256), np.float32), np.zeros((256, 256))
    rows[:, :192], moments[:192, :192] = weights(4, 192), correlated(192)
    values = decode(Q4_K, encode_compensated(rows, Q4_K, Factor.of(moments, n_real=192)))
    assert not values[:, 192:].any()


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
    np.testing.assert_allclose(work, expected, atol=5e-7)  # up to 256 terms are added up in float32


@pytest.mark.parametrize("n_rows", [1, 16, 19])
@pytest.mark.parametrize(("start", "stop"), [(0, 256), (256, 512), (512, 560), (64, 96)])
def test_pulls_are_those_of_whole_rows(n_rows: int, start: int, stop: int) -> None:
    errors, pulls = weights(n_rows, N_COLS), np.empty((n_rows, stop - start), np.float32)
    pull(as_source(-errors), as_source(FACTOR.hessian), start, stop, pulls.reshape(-1))
    expected = errors.astype(float) @ FACTOR.hessian[:, start:stop]
    np.testing.assert_allclose(pulls, expected, atol=1e-6)


@pytest.mark.parametrize("n", [32, 64, 256])
def test_errors_make_up_for_the_moves(n: int) -> None:
    moves, upper = weights(19, n), np.ascontiguousarray(FACTOR.upper[:n, :n])
    errors = np.empty_like(moves)
    errors_of(as_source(moves), as_source(upper), n, errors.reshape(-1))
    np.testing.assert_allclose(errors.astype(float) @ upper, moves, atol=1e-7)
