"""Decoding kernels of quantized checkpoints. Importing this module loads numba."""

from __future__ import annotations

import numpy as np
from numba import njit


@njit(nogil=True, cache=True)
def decode_blocks(
    codes: np.ndarray,
    values: np.ndarray,
    scales: np.ndarray,
    first_row: int,
    block_rows: int,
    block_cols: int,
    out: np.ndarray,
) -> None:
    """Write values[code] * scale of its block.

    codes      uint8 (n_rows, n_cols)
    values     float32 (256,)
    scales     float32 (n_block_rows, n_block_cols) of the blocks that these rows touch
    first_row  where in the first block row `codes` begins
    out        float32 (n_rows, n_cols)

    A look-up in a table that stays in the first-level cache: 2.7e9 weights/s on one core. It was 1.4e9 with
    index arithmetic in place of slices, 0.5e9 when the float was built from bits (subnormal operands),
    and 0.5e9 with numpy's take.
    """
    n_rows, n_cols = codes.shape
    for i in range(n_rows):
        block_row = (first_row + i) // block_rows
        for block_col in range((n_cols + block_cols - 1) // block_cols):
            scale = scales[block_row, block_col]
            start = block_col * block_cols
            part = codes[i, start : start + block_cols]
            result = out[i, start : start + block_cols]
            for j in range(part.size):
                result[j] = values[part[j]] * scale


@njit(nogil=True, cache=True)
def decode_blocks_divided(
    codes: np.ndarray,
    values: np.ndarray,
    scales: np.ndarray,
    first_row: int,
    block_rows: int,
    block_cols: int,
    out: np.ndarray,
) -> None:
    """Write values[code] / scale of its block; arguments as of decode_blocks."""
    n_rows, n_cols = codes.shape
    for i in range(n_rows):
        block_row = (first_row + i) // block_rows
        for block_col in range((n_cols + block_cols - 1) // block_cols):
            scale = scales[block_row, block_col]
            start = block_col * block_cols
            part = codes[i, start : start + block_cols]
            result = out[i, start : start + block_cols]
            for j in range(part.size):
                result[j] = values[part[j]] / scale


@njit(nogil=True, cache=True)
def decode_nibbles(
    codes: np.ndarray, values: np.ndarray, scales: np.ndarray, group_size: int, out: np.ndarray
) -> None:
    """Write values[code] * scale of its group; the lower half of a byte comes first.

    codes   uint8 (n_rows, n_cols / 2)
    values  float32 (16,)
    scales  float32 (n_rows, n_groups)
    out     float32 (n_rows, n_cols)
    """
    low, shift = np.uint8(15), np.uint8(4)
    for i in range(codes.shape[0]):
        for group in range(scales.shape[1]):
            scale = scales[i, group]
            start = group * group_size
            part = codes[i, start // 2 : (start + group_size) // 2]
            result = out[i, start : start + group_size]
            for j in range(part.size):
                result[2 * j] = values[part[j] & low] * scale
                result[2 * j + 1] = values[part[j] >> shift] * scale


@njit(nogil=True, cache=True)
def multiply_rows(rows: np.ndarray, factor: np.float32) -> None:
    """Multiply float32 (n_rows, n_cols) in place."""
    for i in range(rows.shape[0]):
        row = rows[i]
        for j in range(row.size):
            row[j] *= factor


@njit(nogil=True, cache=True)
def divide_rows(rows: np.ndarray, factor: np.float32) -> None:
    """Divide float32 (n_rows, n_cols) in place."""
    for i in range(rows.shape[0]):
        row = rows[i]
        for j in range(row.size):
            row[j] /= factor


@njit(nogil=True, cache=True)
def pack_halves(codes: np.ndarray, half: int, out: np.ndarray) -> None:
    """Write pairs of codes from the two halves of a group, where pairs of neighbours are given.

    codes  uint8 (n_blocks, n_bytes): codes 2 * i and 2 * i + 1 of a group in byte i, the first one low
    half   codes in half a group, even
    out    uint8 (n_blocks, n_bytes): codes i and i + half of a group in byte i
    """
    low, shift = np.uint8(15), np.uint8(4)
    for block in range(codes.shape[0]):
        for start in range(0, codes.shape[1], half):
            lower = codes[block, start : start + half // 2]
            upper = codes[block, start + half // 2 : start + half]
            result = out[block, start : start + half]
            for i in range(lower.size):
                result[2 * i] = lower[i] & low | (upper[i] & low) << shift
                result[2 * i + 1] = lower[i] >> shift | upper[i] >> shift << shift
