"""Packers of 8-bit floats, 4-bit floats and packed integers, written from the layouts alone; see packers.py.

Each takes a float32 matrix and returns the tensors stored for its module (suffix -> array), and the float32
matrix that these decode to.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from tests.support.checkpoints import dequantize_fp8, quantize_fp8
from tests.support.packers import Packed, pack_low_first, quantize_groups

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)


def fp8(
    weight: np.ndarray,
    block: tuple[int, int],
    suffix: str,
    *,
    powers: bool = False,
    stored: Any = np.float32,
    shape: tuple[int, ...] | None = None,
) -> Packed:
    """Pack as e4m3fn with a scale for every block.

    powers  make the scales powers of two
    stored  dtype of the scales; uint8 stores their exponents
    shape   shape of the scales; by default that of the grid of blocks
    """
    codes, scales = quantize_fp8(weight, block)
    if powers:
        scales = np.exp2(np.ceil(np.log2(scales))).astype(np.float32)
    scales = scales.astype(ml_dtypes.float8_e8m0fnu if stored is np.uint8 else stored)
    grid = scales.astype(np.float32)
    wide = np.repeat(np.repeat(grid, block[0], axis=0), block[1], axis=1)[: len(weight), : weight.shape[1]]
    codes = np.clip(weight / wide, -448, 448).astype(codes.dtype)
    if stored is np.uint8:
        scales = scales.view(np.uint8)
    tensors = {".weight": codes, suffix: scales.reshape(scales.shape if shape is None else shape)}
    return tensors, dequantize_fp8(codes, grid, block)


def packed_integers(weight: np.ndarray, bits: int, groups: np.ndarray, *, act_order: bool = False) -> Packed:
    """Pack as compressed-tensors' pack-quantized with zero points; 2, 4 or 8 bits."""
    codes, zeros, scales, meaning = quantize_groups(weight, bits, groups)
    tensors = {
        ".weight_packed": pack_low_first(codes, bits).view(np.int32),
        ".weight_zero_point": np.ascontiguousarray(pack_low_first(zeros.T, bits).T).view(np.int32),
        ".weight_scale": scales,
        ".weight_shape": np.array(weight.shape, np.int64),
    }
    if act_order:
        tensors[".weight_g_idx"] = groups.astype(np.int32)
    return tensors, meaning


def _nearest_e2m1(ratio: np.ndarray) -> np.ndarray:
    """Return the codes of the nearest 4-bit floats, uint8."""
    codes = np.abs(np.abs(ratio)[:, :, None] - E2M1).argmin(axis=2)
    return (codes + 8 * (ratio < 0)).astype(np.uint8)


def _pairs(codes: np.ndarray) -> np.ndarray:
    return (codes[:, ::2] | codes[:, 1::2] << 4).astype(np.uint8)


def _values(codes: np.ndarray) -> np.ndarray:
    return np.where(codes < 8, 1, -1).astype(np.float32) * E2M1[codes % 8]


def mxfp4(weight: np.ndarray) -> Packed:
    """Pack as compressed-tensors' mxfp4: groups of 32, exponents as bytes."""
    largest = np.abs(weight).reshape(len(weight), -1, 32).max(axis=2)
    exponents = np.clip(np.floor(np.log2(np.maximum(largest, 1e-30))) - 2, -127, 127)
    wide = np.repeat(np.exp2(exponents), 32, axis=1).astype(np.float32)
    codes = _nearest_e2m1(weight / wide)
    return {
        ".weight_packed": _pairs(codes), ".weight_scale": (exponents + 127).astype(np.uint8)
    }, _values(codes) * wide  # fmt: skip


def nvfp4(weight: np.ndarray, factor: np.float32 | None = None) -> Packed:
    """Pack as ModelOpt's NVFP4: groups of 16 with 8-bit scales, and one factor for the matrix."""
    if factor is None:
        factor = np.float32(np.abs(weight).max() / (6 * 448))
    largest = np.abs(weight).reshape(len(weight), -1, 16).max(axis=2)
    scales = np.maximum(largest / 6 / factor, 2**-9).astype(ml_dtypes.float8_e4m3fn)
    wide = np.repeat(scales.astype(np.float32), 16, axis=1)
    codes = _nearest_e2m1(weight / (wide * factor))
    tensors = {".weight": _pairs(codes), ".weight_scale": scales, ".weight_scale_2": factor.reshape(())}
    return tensors, _values(codes) * wide * factor
