"""Scales of all types that have some: rows are linear in them, and derivatives are those of the decoder."""

from __future__ import annotations

import numpy as np
import pytest

from gguf_tools.format.ggml_types import by_name
from imatrix.calibrate.refine.scales import RowScales, row_scales
from quantize.formats import available, get_decoder, get_format
from quantize.importances.weighting import ColumnWeights

N_ROWS = 3


def scales_of(name: str) -> RowScales | None:
    type_ = by_name(name)
    return row_scales(type_, 2 * type_.block_elems)


MOVABLE = [name for name in available() if scales_of(name) is not None]


@pytest.fixture
def encoded(request: pytest.FixtureRequest) -> tuple[RowScales, np.ndarray]:
    """The scales of a type, and rows of it, uint8 (n_rows, row bytes)."""
    scales = scales_of(request.param)
    assert scales is not None
    rng = np.random.default_rng(0)
    weights = rng.standard_normal((N_ROWS, scales.n_cols)).astype(np.float32)
    alike = ColumnWeights(np.ones(scales.n_cols, np.float32))
    rows = get_format(request.param).encode(weights, alike)
    return scales, np.asarray(rows).reshape(N_ROWS, -1)


of_all_types = pytest.mark.parametrize("encoded", MOVABLE, indirect=True)


def test_what_has_movable_scales() -> None:
    assert {"Q4_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q6_K", "IQ2_XS", "IQ4_XS", "IQ4_K"} <= {*MOVABLE}
    assert {"F16", "BF16", "IQ1_M", "MXFP4", "NVFP4"}.isdisjoint(MOVABLE)
    assert [row_scales(by_name(name), 256) for name in ("F32", "IQ1_M", "MXFP4")] == [None] * 3
    q2 = scales_of("Q2_K")
    assert q2 is not None
    assert q2.shape == (2, 2)
    assert q2.places.tolist() == [[80, 82], [164, 166]]


@of_all_types
def test_the_same_scales_are_the_same_bytes(encoded: tuple[RowScales, np.ndarray]) -> None:
    scales, rows = encoded
    found = scales.read(rows)
    assert found.shape == (N_ROWS, *scales.shape)
    np.testing.assert_array_equal(scales.replaced(rows, found), rows)
    assert np.abs(found).max() > 0


@of_all_types
def test_twice_the_scales_are_twice_the_weights(encoded: tuple[RowScales, np.ndarray]) -> None:
    scales, rows = encoded
    decode = get_decoder(scales.type)
    twice = decode(scales.replaced(rows, 2 * scales.read(rows)), scales.n_cols)
    np.testing.assert_allclose(twice, 2 * decode(rows, scales.n_cols), rtol=1e-6)


@of_all_types
def test_derivatives_are_those_of_the_decoder(encoded: tuple[RowScales, np.ndarray]) -> None:
    scales, rows = encoded
    decode, found = get_decoder(scales.type), scales.read(rows)
    by_weight = np.random.default_rng(1).standard_normal((N_ROWS, scales.n_cols)).astype(np.float32)
    derivative = scales.by_change(rows, by_weight)
    weights = decode(rows, scales.n_cols)
    for group, field in np.ndindex(scales.shape):
        changed = found.copy()
        changed[:, group, field] *= 2  # linear, so a large step is as good as a small one
        moved = decode(scales.replaced(rows, changed), scales.n_cols) - weights
        expected = np.sum(moved.astype(np.float64) * by_weight, axis=1)
        np.testing.assert_allclose(derivative[:, group, field], expected, rtol=1e-4, atol=1e-4)
