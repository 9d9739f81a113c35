"""4-bit integers, two rows in a byte: ModelOpt's W4A16_AWQ.

    X.weight        U8 (rows / 2, cols)  byte (r, j) holds row 2 * r in its lower half and row 2 * r + 1 in
                                         the upper, both in two's complement
    X.weight_scale  float (rows, groups)

    weight[i, j] = code[i, j] * scale[i, group]     the exact value rounded once

Where X.pre_quant_scale is stored too, the model scales the inputs of X at run time; that is refused.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from convert.checkpoint.safetensors_file import RawTensor
from convert.weights.base import Decoded, Module, WeightsLoader
from convert.weights.scales import ScaleGrid, scale_grid


@dataclass(frozen=True, slots=True)
class RowPairWeight(Decoded):
    """A matrix of signed 4-bit integers whose rows share bytes in pairs.

    pairs   U8 (rows / 2, cols); for an odd range the pair at its edge is read too
    scales  of groups of columns
    """

    pairs: RawTensor
    scales: ScaleGrid

    @property
    def stored_as(self) -> str:
        return f"int4 {self.scales.described}"

    def read_rows(self, start: int, stop: int) -> np.ndarray:
        # numba is loaded by the first weight that is decoded, not by looking at a checkpoint.
        from convert.weights.kernels import scale_groups

        first = start // 2
        pairs = self.pairs.read_rows(first, -(-stop // 2)).view(np.int8)
        codes = np.stack([(pairs << 4) >> 4, pairs >> 4], axis=1).reshape(-1, pairs.shape[1])
        codes = codes[start - 2 * first : stop - 2 * first]
        scales = self.scales.of_rows(start, stop)
        rows = np.empty(codes.shape, np.float32)
        scale_groups(codes, np.zeros_like(scales), scales, self.scales.block[1], rows)
        return rows


def _fits(module: Module) -> bool:
    scales = module.get(".weight_scale")
    return (
        module[".weight"].dtype == "U8"
        and scales is not None
        and scales.dtype in ("F32", "BF16", "F16")
        and len(scales.shape) == 2
    )


def _load(module: Module) -> RowPairWeight:
    pairs = module[".weight"]
    if len(pairs.shape) != 2:
        raise module.wrong(pairs, f"shape {pairs.shape}", "a matrix")
    shape = 2 * pairs.shape[0], pairs.shape[1]
    return RowPairWeight(module.name, shape, pairs, scale_grid(module, shape, module[".weight_scale"]))


LOADERS = (
    WeightsLoader(
        format="int4 in row pairs",
        methods=("modelopt",),
        main=".weight",
        sides=(".weight_scale",),
        fits=_fits,
        load=_load,
    ),
)
