"""What happens to activations beside matrix products, in one pass each, where torch would make three."""

from __future__ import annotations

import numpy as np
import torch

from quantize.simd.kernel import kernel
from quantize.simd.tiles import read_item

_ROWS = 256
"""How many squares are added up in float32; what they give is added up in float64."""

_COLS = 256
"""How many columns are added up at a time: their sums stay in the first-level cache."""


def sums_of_squares(stack: torch.Tensor) -> torch.Tensor:
    """Return the sum over the rows of the squares, float64 (n_mats, n_cols), on the CPU.

    stack  float32 or bfloat16 (n_mats, n_rows, n_cols), on any device
    """
    if stack.device.type != "cpu":
        return squared_by_torch(stack)
    out = np.zeros((stack.shape[0], stack.shape[2]))
    _square(_as_items(stack), out)
    return torch.from_numpy(out)


def squared_by_torch(stack: torch.Tensor) -> torch.Tensor:
    """Return the same from any device."""
    parts = [rows.float().square().sum(1) for rows in stack.split(_ROWS, 1)]
    return torch.stack(parts).sum(0, dtype=torch.float64).cpu()


def add_weighted(
    target: torch.Tensor, numbers: torch.Tensor, rows: torch.Tensor, weights: torch.Tensor
) -> None:
    """Add `rows`, each times its weight, to the rows of `target` with these numbers.

    target   float32 (n_targets, n_cols), on the CPU like the others
    numbers  int64 (n_rows,), all different
    rows     float32 or bfloat16 (n_rows, n_cols)
    weights  float32 (n_rows,)
    """
    _add(target.numpy(), numbers.numpy(), _as_items(rows), weights.numpy())


def _as_items(rows: torch.Tensor) -> np.ndarray:
    """Return rows, float32 or bfloat16, as an array for `read_item`."""
    rows = rows.contiguous()
    return (rows.view(torch.uint16) if rows.dtype == torch.bfloat16 else rows).numpy()


@kernel
def _square(stack: np.ndarray, out: np.ndarray) -> None:
    n_mats, n_rows, n_cols = stack.shape
    part = np.empty(_COLS, np.float32)
    for mat in range(n_mats):
        for first_row in range(0, n_rows, _ROWS):
            for first_col in range(0, n_cols, _COLS):
                width = min(_COLS, n_cols - first_col)
                part[:] = np.float32(0)
                for row in range(first_row, min(n_rows, first_row + _ROWS)):
                    values = stack[mat, row, first_col : first_col + width]
                    for i in range(width):
                        value = read_item(values, i)
                        part[i] += value * value
                for i in range(width):
                    out[mat, first_col + i] += part[i]


@kernel
def _add(target: np.ndarray, numbers: np.ndarray, rows: np.ndarray, weights: np.ndarray) -> None:
    for row in range(numbers.size):
        into, values, weight = target[numbers[row]], rows[row], weights[row]
        for i in range(into.size):
            into[i] += read_item(values, i) * weight
