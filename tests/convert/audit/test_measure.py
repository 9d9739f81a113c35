"""Sums over rows against obvious ones, and which rows are read."""

from __future__ import annotations

import numpy as np
import pytest

from convert.audit.diagnose import _plural
from convert.audit.measure import Sums, runs_of
from convert.audit.pairs import fits as fit_in_rows
from convert.audit.search import fits
from convert.audit.transforms import (
    halves_turned,
    interleaved,
    one_below_the_other,
    taken_apart,
    within,
)
from gguf_tools.format.ggml_types import by_name
from gguf_tools.format.tensors import TensorInfo

RNG = np.random.default_rng(0)


def test_sums_are_those_of_the_definition() -> None:
    wanted, found = RNG.normal(size=(2, 5, 64)).astype(np.float32)
    sums = Sums.of(wanted, found)
    a, b = wanted.astype(np.float64), found.astype(np.float64)
    lengths = np.linalg.norm(a, axis=1), np.linalg.norm(b, axis=1)
    np.testing.assert_allclose(sums.relative, np.linalg.norm(a - b, axis=1) / lengths[0], rtol=1e-5)
    np.testing.assert_allclose(sums.cosine, (a * b).sum(1) / lengths[0] / lengths[1], atol=1e-5)
    np.testing.assert_allclose(sums.slope, (a * b).sum(1) / lengths[1] ** 2, atol=1e-5)
    np.testing.assert_allclose(sums.scale, (a * b).sum(1) / lengths[0] ** 2, atol=1e-5)


def test_nothing_against_nothing_is_no_error() -> None:
    zeros, ones = np.zeros((1, 32), np.float32), np.ones((1, 32), np.float32)
    assert Sums.of(zeros, zeros).relative == 0
    assert Sums.of(zeros, ones).relative == np.inf
    assert Sums.of(ones, zeros).cosine == 0


@pytest.mark.parametrize(
    ("shape", "type_", "every_row"),
    [
        ((4096, 256), "Q4_K", True), ((4096, 256), "Q4_K", False), ((64, 512, 256), "Q4_K", False),
        ((64, 512, 256), "Q4_K_R4", False), ((64, 512, 256), "IQ4_XS_R8", True), ((256,), "F32", False),
        ((3, 7, 32), "Q8_0", False), ((1, 32), "F32", False),
    ],
)  # fmt: skip
def test_every_matrix_is_looked_at_from_first_to_last_row(
    shape: tuple[int, ...], type_: str, every_row: bool
) -> None:
    info = TensorInfo("t", shape, by_name(type_))
    runs = list(runs_of(info, every_row=every_row))
    n_rows = shape[-2] if len(shape) > 1 else 1
    rows = [row for start, stop in runs for row in range(start, stop)]
    assert len(rows) == len(set(rows))
    for matrix in range(info.n_mats):
        own = [row - matrix * n_rows for row in rows if row // n_rows == matrix]
        assert min(own) == 0
        assert max(own) == n_rows - 1
    assert all(start // n_rows == (stop - 1) // n_rows for start, stop in runs)
    assert all(start % info.type.rows_interleaved == 0 for start, stop in runs)
    if every_row:
        assert len(rows) == info.n_rows


def test_moves() -> None:
    """A head of six rows, of which the last four are rotated."""
    rows = np.arange(12)
    assert within(6, 2, 4, interleaved(4))(rows).tolist() == [0, 1, 2, 4, 3, 5, 6, 7, 8, 10, 9, 11]
    there_and_back = within(6, 2, 4, taken_apart(4))(within(6, 2, 4, interleaved(4))(rows))
    assert there_and_back.tolist() == rows.tolist()
    turned = within(6, 0, 6, halves_turned(4, 2))(np.arange(6))
    assert turned.tolist() == [4, 5, 0, 1, 2, 3]
    assert one_below_the_other(2, 1, 2)(np.arange(6)).tolist() == [0, 3, 1, 2, 4, 5]


@pytest.mark.parametrize("kind", ["scaled", "scales-missing", "row-scales", "column-scales"])
def test_factors_are_found(kind: str) -> None:
    wanted = RNG.normal(size=(128, 512)).astype(np.float32)
    factors = {
        "scaled": np.full((1, 1), 3.0),
        "scales-missing": np.kron(RNG.uniform(1, 2, (1, 4)), np.ones((128, 128))),
        "row-scales": RNG.uniform(1, 2, (128, 1)),
        "column-scales": RNG.uniform(1, 2, (1, 512)),
    }[kind]
    noise = RNG.normal(size=wanted.shape) * 0.01
    found = (wanted * factors * (1 + noise)).astype(np.float32)
    errors = {fit.kind: fit.relative for fit in fits(wanted, found)}
    assert errors[kind] < 0.011
    if kind != "scaled":
        assert errors["scaled"] > 0.1


def test_long_lists_of_rows_are_cut() -> None:
    assert _plural("row", "rows", np.array([3])) == "row 3"
    assert _plural("row", "rows", np.array([3, 4, 5, 9])) == "rows 3-5,9"
    text = _plural("row", "rows", np.arange(0, 1000, 2))
    assert text.endswith(", ... 500 in all")
    assert len(text) < 90


def test_a_tensor_without_dimensions_is_a_row_of_one() -> None:
    assert fit_in_rows((), (1,))
    assert fit_in_rows((2, 3, 4), (6, 4))
    assert not fit_in_rows((), (2,))
    assert not fit_in_rows((4,), (2, 2))
