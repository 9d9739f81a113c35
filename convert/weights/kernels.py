"""Decoding kernels of quantized checkpoints. Importing this module loads numba."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit

from quantize.simd.kernel import inlinable, kernel
from quantize.simd.lane_memory import gather, load, store
from quantize.simd.lanes import LANES, Floats, any_lane, bits, from_bits, select, to_float


class Float8(NamedTuple):
    """An 8-bit float: 1 sign bit, then exponent and fraction.

    fraction_bits  bits of the fraction
    bias           of the exponent; an exponent of 0 makes a subnormal number
    largest        the largest code of a plain number, its sign off; what is above is infinite or NaN
    values         float32 (256,): the value of every code
    """

    fraction_bits: int
    bias: int
    largest: int
    values: np.ndarray


@kernel
def decode_blocks(
    codes: np.ndarray,
    float8: Float8,
    scales: np.ndarray,
    first_row: int,
    block_rows: int,
    block_cols: int,
    divides: bool,
    out: np.ndarray,
) -> None:
    """Write the value of each code times the scale of its block, or divided by it.

    codes      uint8 (n_rows * n_cols,)
    scales     float32 (n_block_rows, n_block_cols) of the blocks that these rows touch
    first_row  where in the first block row `codes` begins
    out        float32 (n_rows, n_cols)
    """
    n_rows, n_cols = out.shape
    flat = out.reshape(-1)
    for i in range(n_rows):
        block_row = (first_row + i) // block_rows
        for block_col in range((n_cols + block_cols - 1) // block_cols):
            start = i * n_cols + block_col * block_cols
            stop = i * n_cols + min((block_col + 1) * block_cols, n_cols)
            scale = scales[block_row, block_col]
            whole = stop - (stop - start) % LANES
            for k in range(start, whole, LANES):
                values = _values(codes, k, float8)
                if divides:
                    store(flat, k, values / scale)
                else:
                    store(flat, k, values * scale)
            for k in range(whole, stop):
                value = float8.values[codes[k]]
                flat[k] = value / scale if divides else value * scale


@inlinable
def _values(codes: np.ndarray, index: int, float8: Float8) -> Floats:
    """Return the values of codes[index : index + LANES].

    Exponent and fraction move to where float32 has them. Subnormal numbers are made of integers: as operands
    they would be slow.
    """
    code = load(codes, index)
    size = code & 0x7F
    normal = from_bits((size << 23 - float8.fraction_bits) + (127 - float8.bias << 23))
    least = from_bits(127 + 1 - float8.bias - float8.fraction_bits << 23)
    value = select(size < 1 << float8.fraction_bits, to_float(size) * least, normal)
    if any_lane((size > float8.largest) | (code == 0x80)):  # infinite, NaN, or -0, which some types have not
        return gather(float8.values, code)
    return from_bits(bits(value) | (code & 0x80) << 24)


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
