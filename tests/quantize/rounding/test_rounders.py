"""The battery that every type of the table goes through."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gguf_tools.errors import BadWeights, QuantError, ShapeError
from gguf_tools.format.ggml_types import F16, TYPES, GGMLType
from quantize.rounding.base import PANEL, Effort
from quantize.rounding.factor import Factor
from quantize.rounding.feedback import encode_compensated
from quantize.rounding.rounders import ROUNDERS, can_compensate, get_rounder
from tests.naive import feedback as naive
from tests.quantize.codecs import decode, encode
from tests.quantize.rounding.judged import encode_judged
from tests.quantize.rounding.moments import correlated, weights
from tests.support import samples

every_type = pytest.mark.parametrize("name", ROUNDERS)
N_COLS = 512 + 256
FACTOR = Factor.of(correlated(N_COLS))


def costs(rows: np.ndarray, values: np.ndarray, factor: Factor) -> np.ndarray:
    """Return e H e^T of each row, float64 (n_rows,)."""
    errors = rows.astype(float) - values
    return np.einsum("rc,rc->r", errors @ factor.hessian.astype(float), errors)


def type_named(name: str) -> GGMLType:
    return next(type_ for type_ in TYPES if type_.name == name)


@every_type
def test_the_table_leads_to_the_rounder(name: str) -> None:
    assert get_rounder(type_named(name)).type.name == name
    assert can_compensate(type_named(name))


def test_a_type_without_a_rounder_is_refused() -> None:
    assert not can_compensate(F16)
    with pytest.raises(QuantError, match="F16: no rounding with feedback for this type; there is for"):
        encode_compensated(weights(2, N_COLS), F16, FACTOR)


@every_type
@settings(max_examples=4, deadline=None)
@given(seed=st.integers(0, 2**31), spread=st.sampled_from([1e-3, 0.02, 3.0]))
def test_correlated_columns_cost_less_than_with_the_stock_encoder(
    name: str, seed: int, spread: float
) -> None:
    rows = weights(20, N_COLS, seed) * np.float32(spread / 0.02)
    stock = decode(name, encode(name, rows, np.diag(FACTOR.hessian).copy()))
    ours = decode(name, encode_compensated(rows, type_named(name), FACTOR))
    assert costs(rows, ours, FACTOR).sum() < 0.9 * costs(rows, stock, FACTOR).sum()


@every_type
def test_a_row_is_encoded_the_same_whatever_stands_beside_it(name: str) -> None:
    rows = weights(37, N_COLS)
    together = encode_compensated(rows, type_named(name), FACTOR)
    for start, stop in ((0, 1), (1, 18), (30, 37)):
        alone = encode_compensated(rows[start:stop], type_named(name), FACTOR)
        np.testing.assert_array_equal(together[start:stop], alone)


@every_type
def test_values_are_what_the_bytes_decode_to(name: str) -> None:
    rounder = get_rounder(type_named(name))
    data, values = rounder.round_block(weights(21, PANEL), FACTOR.panel(0, PANEL), Effort())
    assert data.shape == (21, rounder.type.row_bytes(PANEL))
    np.testing.assert_array_equal(values, decode(name, data))


@every_type
def test_errors_are_fed_back_from_block_to_block_as_by_the_twin(name: str) -> None:
    rounder = get_rounder(type_named(name))
    rows = weights(2, N_COLS)

    def round_block(w: np.ndarray, first: int) -> np.ndarray:
        return rounder.round_block(w[None], FACTOR.panel(first, first + len(w)), Effort())[1][0]

    twins = [naive.round_row(row, FACTOR.upper, round_block) for row in rows]
    ours = encode_compensated(rows, rounder.type, FACTOR, Effort(sweeps=0))
    np.testing.assert_array_equal(decode(name, ours), twins)


@every_type
@pytest.mark.parametrize("kind", ["zero", "sparse", "constant", "single_outlier", "mixed_scales", "positive"])
def test_odd_rows_are_encoded_too(name: str, kind: str) -> None:
    rows = samples.rows(kind, (17, N_COLS))
    stock = decode(name, encode(name, rows, np.diag(FACTOR.hessian).copy()))
    ours = decode(name, encode_judged(rows, type_named(name), FACTOR))
    assert np.isfinite(ours).all()
    assert (costs(rows, ours, FACTOR) <= (1 + 1e-4) * costs(rows, stock, FACTOR)).all()


@every_type
def test_rows_of_zeros_stay_zeros(name: str) -> None:
    data = encode_compensated(np.zeros((17, N_COLS), np.float32), type_named(name), FACTOR)
    assert not decode(name, data).any()


@every_type
def test_no_rows_are_no_bytes(name: str) -> None:
    data = encode_compensated(weights(0, N_COLS), type_named(name), FACTOR)
    assert data.shape == (0, type_named(name).row_bytes(N_COLS))


@every_type
def test_what_does_not_fit_is_named(name: str) -> None:
    rows = weights(3, N_COLS)
    with pytest.raises(ShapeError, match=f"{name}: rows of 512 columns, but second moments of 768"):
        encode_compensated(rows[:, :512], type_named(name), FACTOR)
    rows[1, 5] = np.nan
    with pytest.raises(BadWeights, match=f"{name}: row 1, column 5: a weight is not a finite number"):
        encode_compensated(rows, type_named(name), FACTOR)


def test_sources_of_16_bits_are_taken_as_they_are() -> None:
    rows = weights(4, N_COLS).astype(np.float16)
    np.testing.assert_array_equal(
        encode_compensated(rows, type_named("Q4_K"), FACTOR),
        encode_compensated(rows.astype(np.float32), type_named("Q4_K"), FACTOR),
    )
