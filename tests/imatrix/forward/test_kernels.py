"""Kernels on activations against the obvious arithmetic in float64."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from imatrix.forward import kernels  # noqa: E402

SHAPES = [(1, 1, 1), (1, 512, 2048), (3, 300, 257), (2, 5000, 16), (1, 0, 8), (0, 4, 8)]


def random(shape: tuple[int, ...], dtype: str) -> torch.Tensor:
    rng = np.random.default_rng(list(shape))
    return torch.from_numpy(rng.standard_normal(shape).astype(np.float32)).to(getattr(torch, dtype))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_sums_of_squares(shape: tuple[int, ...], dtype: str) -> None:
    stack = random(shape, dtype)
    expected = stack.double().square().sum(1)
    for found in (kernels.sums_of_squares(stack), kernels.squared_by_torch(stack)):
        assert found.dtype == torch.float64
        assert found.shape == (shape[0], shape[2])
        torch.testing.assert_close(found, expected, rtol=3e-6, atol=0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sums_of_squares_of_columns_in_between(dtype: str) -> None:
    stack = random((4, 33, 70), dtype)[1:3, ::2, 5:50]
    expected = stack.double().square().sum(1)
    torch.testing.assert_close(kernels.sums_of_squares(stack), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_nan_and_infinity_show_in_their_column_alone(value: float, dtype: str) -> None:
    stack = random((1, 40, 30), dtype)
    stack[0, 17, 3] = value
    finite = torch.isfinite(kernels.sums_of_squares(stack))[0]
    assert not finite[3]
    assert int(finite.sum()) == 29


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("n_cols", [1, 100, 2048])
def test_add_weighted(n_cols: int, dtype: str) -> None:
    target, rows = random((20, n_cols), "float32"), random((2 * n_cols, 7), dtype).T[:, ::2]
    numbers, weights = torch.tensor([0, 3, 4, 5, 11, 18, 19]), random((7,), "float32")
    expected = target.double().index_add(0, numbers, rows.double() * weights.double()[:, None])
    untouched = target[1].clone()
    kernels.add_weighted(target, numbers, rows, weights)
    torch.testing.assert_close(target.double(), expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(target[1], untouched)
    kernels.add_weighted(target, numbers[:0], rows[:0], weights[:0])
    torch.testing.assert_close(target.double(), expected, rtol=1e-5, atol=1e-6)
