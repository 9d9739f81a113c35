"""4-bit floats (E2M1) with a scale for every 16 or 32 columns: MXFP4 and NVFP4.

Codes 0 .. 7 are 0, 0.5, 1, 1.5, 2, 3, 4, 6, and codes 8 .. 15 are their negatives. A byte holds two codes,
the first one in its lower half. The scale of a group is a power of two stored as its exponent (MXFP4, groups
of 32), or an 8-bit float that a factor of the whole matrix brings into range (NVFP4, groups of 16):

    X.weight_packed U8 (rows, cols / 2)   X.weight_scale U8 (rows, groups)       compressed-tensors, MXFP4
    X.weight_packed U8                    X.weight_scale F8_E4M3                 compressed-tensors, NVFP4
                                          X.weight_global_scale F32 (1,): divides
    X.weight U8                           X.weight_scale U8                      ModelOpt, MXFP4
    X.weight U8                           X.weight_scale F8_E4M3                 ModelOpt, NVFP4
                                          X.weight_scale_2 F32 (): multiplies
    X.weight I8                           X.scale F8_E8M0 (rows, groups)         DeepSeek-V4's experts
    X_blocks U8 (mats, rows, groups, 16)  X_scales U8 (mats, rows, groups)       gpt-oss; the weight is X

    weight[i, j] = value(code[i, j]) * scale[i, group] * factor

The first product is exact in float32, so the result is the exact value rounded once. The rows of gpt-oss are
outputs, as everywhere else; its program transposes them after reading.

GGUF has both formats, with the codes in another order. Its NVFP4 has no place for the factor, so only a
matrix whose factor is 1 can keep its codes.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import ClassVar

import ml_dtypes
import numpy as np

from convert.checkpoint.safetensors_file import RawTensor
from convert.weights.base import Module, WeightsLoader, rows_and_cols
from convert.weights.scales import decode_scales
from gguf_tools.errors import CheckpointError, UnsupportedCheckpoint
from gguf_tools.format.ggml_types import F32, MXFP4, NVFP4, GGMLType

E2M1_VALUES = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)
"""Code -> value, float32 (16,); exact."""

MX_GROUP, NV_GROUP = 32, 16
"""Columns that share a scale."""


@dataclass(frozen=True, slots=True)
class Fp4Weight:
    """A matrix of 4-bit floats, or a stack of them.

    codes       bytes of two codes, as many rows as the weight has
    scales      (rows, groups), counted over all matrices
    group_size  columns of a group
    factor      of the whole matrix, None for none
    divides     whether the factor divides
    type        MXFP4 or NVFP4 where blocks of that hold the same weights, otherwise F32
    """

    name: str
    shape: tuple[int, ...]
    codes: RawTensor
    scales: RawTensor
    group_size: int
    factor: RawTensor | None
    divides: bool
    type: GGMLType
    by_rows: ClassVar[bool] = True

    @property
    def stored_as(self) -> str:
        return "NVFP4" if self.group_size == NV_GROUP else "MXFP4"

    def read_rows(self, start: int, stop: int) -> np.ndarray:
        # numba is loaded by the first weight that is decoded, not by looking at a checkpoint.
        from convert.weights.kernels import decode_nibbles, divide_rows, multiply_rows

        n_cols = self.shape[-1]
        rows = np.empty((stop - start, n_cols), np.float32)
        decode_nibbles(
            self.read_codes(start, stop), E2M1_VALUES, self.read_scales(start, stop), self.group_size, rows
        )
        if self.factor is not None:
            factor = np.float32(self.factor.read().astype(np.float32).item())
            (divide_rows if self.divides else multiply_rows)(rows, factor)
        return rows

    def raw_rows(self, start: int, stop: int) -> np.ndarray:
        """Return rows `start` to `stop` as blocks of `type`, uint8 (n_bytes,).

        raises  CheckpointError for a scale that is NaN or negative
        """
        from convert.weights.kernels import pack_halves

        stored = self._stored_scales(start, stop)
        bad = stored == 0xFF if self.group_size == MX_GROUP else stored >= 0x7F
        if bad.any():
            row = start + int(np.argmax(bad.any(axis=1)))
            raise CheckpointError(
                f"{self.scales.path}: {self.scales.name}: row {row} has a scale that is NaN or negative,"
                f" which {self.type.name} can't hold"
            )
        n_groups = self.type.block_elems // self.group_size
        blocks = np.empty((stored.size // n_groups, self.type.block_bytes), np.uint8)
        scales, codes = blocks[:, :n_groups], blocks[:, n_groups:]
        scales[:] = stored.reshape(scales.shape)
        pack_halves(self.read_codes(start, stop).reshape(codes.shape), self.group_size // 2, codes)
        return blocks.reshape(-1)

    def _stored_scales(self, start: int, stop: int) -> np.ndarray:
        return _row_range(self.scales, self.shape, start, stop).view(np.uint8)

    def read_codes(self, start: int, stop: int) -> np.ndarray:
        """Return the codes of rows `start` to `stop`, uint8 (stop - start, n_cols / 2), low halves first."""
        return _row_range(self.codes, self.shape, start, stop).view(np.uint8)

    def read_scales(self, start: int, stop: int) -> np.ndarray:
        """Return the scales of rows `start` to `stop`, float32 (stop - start, groups)."""
        return decode_scales(_row_range(self.scales, self.shape, start, stop), self.scales.dtype)


def _row_range(raw: RawTensor, shape: tuple[int, ...], start: int, stop: int) -> np.ndarray:
    """Read what `raw` stores for rows `start` to `stop` of a weight of `shape`, one line per row."""
    n_rows, _ = rows_and_cols(shape)
    lines = raw.n_rows // n_rows
    return raw.read_rows(start * lines, stop * lines).reshape(stop - start, lines * raw.n_cols)


def _is_plainly_named(module: Module) -> bool:
    scales = module.get(".weight_scale")
    if module[".weight"].dtype != "U8" or scales is None:
        return False
    return scales.dtype == "U8" or (scales.dtype == "F8_E4M3" and module.has(".weight_scale_2"))


def _is_expert(module: Module) -> bool:
    scales = module.get(".scale")
    return module[".weight"].dtype == "I8" and scales is not None and scales.dtype == "F8_E8M0"


def _load(
    module: Module, codes_suffix: str, scales_suffix: str, factor_suffix: str = "", *, divides: bool = False
) -> Fp4Weight:
    """Return the weight: NVFP4, whose scales are floats and have a factor, or MXFP4, whose have none."""
    codes, scales = module[codes_suffix], module[scales_suffix]
    is_nv = scales.dtype == "F8_E4M3"
    group_size = NV_GROUP if is_nv else MX_GROUP
    factor = module[factor_suffix] if is_nv else None
    if len(codes.shape) not in (2, 3):
        raise UnsupportedCheckpoint(
            f"{codes.path}: {codes.name}: 4-bit floats of shape {codes.shape}, expected a matrix"
        )
    shape = (*codes.shape[:-1], 2 * codes.n_cols)
    expected = (*shape[:-1], shape[-1] // group_size)
    if scales.shape != expected:
        # Scales in tiles for one kernel have such shapes.
        raise module.wrong(
            scales, f"shape {scales.shape}", f"{expected} for {shape} in groups of {group_size}"
        )
    if factor is not None and (prod(factor.shape) != 1 or factor.dtype not in ("F32", "BF16", "F16")):
        raise module.wrong(factor, f"{factor.dtype} {factor.shape}", "one float")
    return fp4_weight(module, shape, codes, scales, group_size, factor, divides=divides and is_nv)


def _load_stack_of_blocks(module: Module) -> Fp4Weight:
    blocks, scales = module["_blocks"], module["_scales"]
    if len(blocks.shape) < 3 or blocks.shape[-1] != MX_GROUP // 2 or scales.dtype != "U8":
        raise module.wrong(
            blocks, f"{blocks.dtype} {blocks.shape}", f"U8 (..., rows, groups, {MX_GROUP // 2})"
        )
    if scales.shape != blocks.shape[:-1]:
        raise module.wrong(scales, f"shape {scales.shape}", f"{blocks.shape[:-1]}")
    shape = (*blocks.shape[:-2], blocks.shape[-2] * MX_GROUP)
    return fp4_weight(module, shape, blocks, scales, MX_GROUP)


def fp4_weight(
    module: Module,
    shape: tuple[int, ...],
    codes: RawTensor,
    scales: RawTensor,
    group_size: int,
    factor: RawTensor | None = None,
    *,
    divides: bool = False,
) -> Fp4Weight:
    """Return the weight after deciding whether blocks of GGUF can hold it; reads the factor."""
    if not prod(shape):
        raise module.wrong(codes, f"shape {codes.shape}", "a matrix that is not empty")
    blocks = MXFP4 if group_size == MX_GROUP else NVFP4
    same = factor is None or factor.read().astype(np.float32).item() == 1
    fits = shape[-1] % blocks.block_elems == 0
    type_ = blocks if same and fits else F32
    return Fp4Weight(module.name, shape, codes, scales, group_size, factor, divides, type_)


LOADERS = (
    WeightsLoader(
        format="FP4", methods=("compressed-tensors", "auto-round"), main=".weight_packed",
        sides=(".weight_scale", ".weight_global_scale"),
        load=lambda module: _load(
            module, ".weight_packed", ".weight_scale", ".weight_global_scale", divides=True
        ),
        fits=lambda module: module[".weight_packed"].dtype == "U8" and module.has(".weight_scale"),
    ),
    WeightsLoader(
        format="FP4", methods=("modelopt", "mxfp4", "nvfp4"), main=".weight",
        sides=(".weight_scale", ".weight_scale_2"),
        load=lambda module: _load(module, ".weight", ".weight_scale", ".weight_scale_2"),
        fits=_is_plainly_named,
    ),
    WeightsLoader(
        format="FP4 experts", methods=("fp8", "mxfp4"), main=".weight", sides=(".scale",),
        load=lambda module: _load(module, ".weight", ".scale"), fits=_is_expert,
    ),
    WeightsLoader(
        format="MXFP4 blocks", methods=("mxfp4",), main="_blocks", sides=("_scales",), logical="",
        load=_load_stack_of_blocks,
        fits=lambda module: module["_blocks"].dtype == "U8" and module.has("_scales"),
    ),
)  # fmt: skip
