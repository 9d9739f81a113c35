"""The faster library multiplies as exactly as the other one, and only while it is asked to."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from imatrix.forward.device import fast_products


def test_products_stay_those_of_float32() -> None:
    a, b = (
        torch.linspace(-1, 1, 300 * 500).view(300, 500).sin(),
        torch.linspace(0, 9, 500 * 200).view(500, 200),
    )
    exact = a.double() @ b.double()
    # No order of float32 sums of n terms errs by more (Higham, Accuracy and Stability, 3.1).
    most = 500 * 2.0**-24 / (1 - 500 * 2.0**-24) * (a.double().abs() @ b.double().abs())
    before = torch.get_float32_matmul_precision()
    with fast_products("cpu"):
        product = a @ b
    assert ((product - exact).abs() <= most).all()
    assert ((a.bfloat16().double() @ b.bfloat16().double() - exact).abs() > most).any()
    assert torch.get_float32_matmul_precision() == before


def test_other_devices_stay_as_they_are() -> None:
    before = torch.get_float32_matmul_precision()
    with fast_products("cuda"):
        assert torch.get_float32_matmul_precision() == before


_MANY_SHAPES = """
import sys
import subprocess
import sys

import pytest
import torch
from pathlib import Path
from imatrix.forward.workers import give_back
from imatrix.forward.device import fast_products

def resident():
    give_back()
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) >> 10 for line in lines if line.startswith("RssAnon"))

torch.set_num_threads(1)
weight = torch.ones(256, 256)
with fast_products("cpu"):
    for n_rows in range(64, 464):
        torch.ones(n_rows, 256) @ weight
        if n_rows == 163:
            before = resident()
    print(resident() - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
def test_many_shapes_leave_little_behind() -> None:
    """A process of its own, because the libraries look up once how much they are to keep."""
    run = subprocess.run([sys.executable, "-c", _MANY_SHAPES], check=True, capture_output=True, text=True)
    assert int(run.stdout) < 50, "megabytes after 300 shapes more"
