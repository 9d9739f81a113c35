"""What happens to activations beside matrix products, in one pass each, where torch would make three.

Kernels see bfloat16 as uint16, the upper half of a float32: numba has no 16-bit floats.
"""

from __future__ import annotations

import numpy as np
import torch
from numba import njit

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
    stack = stack.contiguous()
    if stack.dtype == torch.bfloat16:
        _square_bfloat16(stack.view(torch.uint16).numpy(), out)
    else:
        _square_float32(stack.numpy(), out)
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
    rows = rows.contiguous()
    if rows.dtype == torch.bfloat16:
        _add_bfloat16(target.numpy(), numbers.numpy(), rows.view(torch.uint16).numpy(), weights.numpy())
    else:
        _add_float32(target.numpy(), numbers.numpy(), rows.numpy(), weights.numpy())


@njit(nogil=True, cache=True)
def _square_float32(stack: np.ndarray, out: np.ndarray) -> None:
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
                        part[i] += values[i] * values[i]
                for i in range(width):
                    out[mat, first_col + i] += part[i]


@njit(nogil=True, cache=True)
def _square_bfloat16(stack: np.ndarray, out: np.ndarray) -> None:
    n_mats, n_rows, n_cols = stack.shape
    part = np.empty(_COLS, np.float32)
    for mat in range(n_mats):
        for first_row in range(0, n_rows, _ROWS):
            for first_col in range(0, n_cols, _COLS):
                width = min(_COLS, n_cols - first_col)
                part[:] = np.float32(0)
                for row in range(first_row, min(n_rows, first_row + _ROWS)):
                    halves = stack[mat, row, first_col : first_col + width]
                    for i in range(width):
                        value = np.uint32(np.uint32(halves[i]) << 16).view(np.float32)
                        part[i] += value * value
                for i in range(width):
                    out[mat, first_col + i] += part[i]


@njit(nogil=True, cache=True)
def _add_float32(target: np.ndarray, numbers: np.ndarray, rows: np.ndarray, weights: np.ndarray) -> None:
    for row in range(numbers.size):
        into, values, weight = target[numbers[row]], rows[row], weights[row]
        for i in range(into.size):
            into[i] += values[i] * weight


@njit(nogil=True, cache=True)
def _add_bfloat16(target: np.ndarray, numbers: np.ndarray, rows: np.ndarray, weights: np.ndarray) -> None:
    for row in range(numbers.size):
        into, halves, weight = target[numbers[row]], rows[row], weights[row]
        for i in range(into.size):
            into[i] += np.uint32(np.uint32(halves[i]) << 16).view(np.float32) * weight
