"""8-bit integers: compressed-tensors' int-quantized and naive-quantized, ModelOpt's W8A16 and W8A8.

    X.weight             I8 (rows, cols)
    X.weight_scale       per tensor, row, group or block, see convert.weights.scales
    X.weight_zero_point  I8 of the same shape, where quantization is not symmetric

    weight[i, j] = (code[i, j] - zero) * scale     of the block of (i, j)

The difference is exact, so the product is the exact value rounded once.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from convert.checkpoint.safetensors_file import RawTensor
from convert.weights.base import Decoded, Module, WeightsLoader
from convert.weights.scales import ScaleGrid, scale_grid
from gguf_tools.errors import UnsupportedCheckpoint


@dataclass(frozen=True, slots=True)
class Int8Weight(Decoded):
    """A matrix of 8-bit integers.

    codes          I8 (rows, cols)
    scales, zeros  of its blocks; zeros None where they are 0
    """

    codes: RawTensor
    scales: ScaleGrid
    zeros: ScaleGrid | None

    @property
    def stored_as(self) -> str:
        return f"int8 {self.scales.described}"

    def read_rows(self, start: int, stop: int) -> np.ndarray:
        # numba is loaded by the first weight that is decoded, not by looking at a checkpoint.
        from convert.weights.kernels import scale_groups

        codes = self.codes.read_rows(start, stop)
        scales = self.scales.of_rows(start, stop)
        zeros = np.zeros_like(scales) if self.zeros is None else self.zeros.of_rows(start, stop)
        rows = np.empty(codes.shape, np.float32)
        scale_groups(codes, zeros, scales, self.scales.block[1], rows)
        return rows


def int8_weight(module: Module, codes: RawTensor, scales: RawTensor, zeros: RawTensor | None) -> Int8Weight:
    """Return a weight of 8-bit integers; CheckpointError when the parts don't fit each other."""
    if len(codes.shape) != 2:
        raise UnsupportedCheckpoint(
            f"{codes.path}: {codes.name}: {codes.dtype} of shape {codes.shape}, expected a matrix"
        )
    grid = scale_grid(module, codes.shape, scales)
    if zeros is None:
        return Int8Weight(module.name, codes.shape, codes, grid, None)
    if zeros.dtype != "I8" or zeros.shape != scales.shape:
        stored = f"zero points stored as {zeros.dtype} {zeros.shape}"
        raise module.wrong(zeros, stored, f"I8 {scales.shape}, as of {scales.name}")
    return Int8Weight(module.name, codes.shape, codes, grid, ScaleGrid(zeros, grid.grid, grid.block))


def _fits(module: Module) -> bool:
    return module[".weight"].dtype == "I8" and module.has(".weight_scale")


def _load(module: Module) -> Int8Weight:
    return int8_weight(module, module[".weight"], module[".weight_scale"], module.get(".weight_zero_point"))


LOADERS = (
    WeightsLoader(
        format="int8",
        methods=("compressed-tensors", "modelopt", "auto-round"),
        main=".weight",
        sides=(".weight_scale", ".weight_zero_point"),
        fits=_fits,
        load=_load,
    ),
)
