"""The faster library multiplies as exactly as the other one, and only while it is asked to."""

from __future__ import annotations

import torch

from forward.products import fast_products


def test_products_stay_those_of_float32() -> None:
    a, b = (
        torch.linspace(-1, 1, 300 * 500).view(300, 500).sin(),
        torch.linspace(0, 9, 500 * 200).view(500, 200),
    )
    exact = a.double() @ b.double()
    before = torch.get_float32_matmul_precision()
    with fast_products("cpu"):
        product = a @ b
    assert float((product - exact).abs().max()) < 1e-6 * float((a.abs() @ b.abs()).max())
    assert torch.get_float32_matmul_precision() == before


def test_other_devices_stay_as_they_are() -> None:
    before = torch.get_float32_matmul_precision()
    with fast_products("cuda"):
        assert torch.get_float32_matmul_precision() == before
