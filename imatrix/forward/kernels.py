"""Kernels on activations besides matrix products; each makes one pass where torch makes three."""

from __future__ import annotations

import numpy as np
import torch

from imatrix.forward.device import is_cpu, to_cpu, to_torch
from quantize.simd.kernel import kernel
from quantize.simd.tiles import read_item

_ROWS = 256
"""Number of squares that are added up in float32; the sums of so many are added up in float64."""

_COLS = 256
"""Number of columns that are added up at a time: their sums stay in the first-level cache."""


def sums_of_squares(stack: torch.Tensor) -> torch.Tensor:
    """Return the sum over the rows of the squares, float64 (n_mats, n_cols), on the CPU.

    stack  float32 or bfloat16 (n_mats, n_rows, n_cols), on any device. Matrices and rows may lie any distance
           apart, as the heads of a query do; nothing is copied as long as the columns lie side by side
    """
    if not is_cpu(stack.device):
        return squared_by_torch(stack)
    n_mats, n_rows, n_cols = stack.shape
    out = np.zeros((n_mats, n_cols))
    if stack.numel():
        if stack.stride(2) != 1 and n_cols > 1:
            stack = stack.contiguous()
        mat_step, row_step, _ = stack.stride()
        n_items = (n_mats - 1) * mat_step + (n_rows - 1) * row_step + n_cols
        _square(_as_items(stack.as_strided((n_items,), (1,))), mat_step, row_step, n_rows, out)
    return to_torch(out)


def squared_by_torch(stack: torch.Tensor) -> torch.Tensor:
    """Return the same as `sums_of_squares`, computed on the stack's own device."""
    blocks = [rows.float().square().sum(1) for rows in stack.split(_ROWS, 1)]
    return to_cpu(torch.stack(blocks).sum(0, dtype=torch.float64))


def add_weighted(
    target: torch.Tensor, numbers: torch.Tensor, rows: torch.Tensor, weights: torch.Tensor
) -> None:
    """Add `rows`, each times its weight, to the rows of `target` with these numbers.

    target   float32 (n_targets, n_cols), on the CPU like the others. Its rows may have several strands of
             n_cols side by side, to each of which the rows are added, and other columns behind them
    numbers  int64 (n_rows,), all different
    rows     float32 or bfloat16 (n_rows, n_cols)
    weights  float32 (n_rows,), or (n_rows, n_strands)
    """
    items = _as_items(rows)
    for strand, of_strand in enumerate(torch.atleast_2d(weights.t()).contiguous()):
        _add(target.numpy(), strand * rows.shape[1], numbers.numpy(), items, of_strand.numpy())


def _as_items(rows: torch.Tensor) -> np.ndarray:
    """Return float32 or bfloat16 rows as an array for `read_item`."""
    rows = rows.contiguous()
    return (rows.view(torch.uint16) if rows.dtype == torch.bfloat16 else rows).numpy()


@kernel
def _square(items: np.ndarray, mat_step: int, row_step: int, n_rows: int, out: np.ndarray) -> None:
    n_mats, n_cols = out.shape
    part = np.empty(_COLS, np.float32)
    for mat in range(n_mats):
        for first_row in range(0, n_rows, _ROWS):
            for first_col in range(0, n_cols, _COLS):
                width = min(_COLS, n_cols - first_col)
                part[:] = np.float32(0)
                for row in range(first_row, min(n_rows, first_row + _ROWS)):
                    start = mat * mat_step + row * row_step + first_col
                    values = items[start : start + width]
                    for i in range(width):
                        value = read_item(values, i)
                        part[i] += value * value
                for i in range(width):
                    out[mat, first_col + i] += part[i]


@kernel
def _add(
    target: np.ndarray, first_col: int, numbers: np.ndarray, rows: np.ndarray, weights: np.ndarray
) -> None:
    for row in range(numbers.size):
        into, values, weight = target[numbers[row], first_col:], rows[row], weights[row]
        for i in range(values.size):
            into[i] += read_item(values, i) * weight
