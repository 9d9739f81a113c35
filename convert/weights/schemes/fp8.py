"""FP8: 8-bit floats with scales, as DeepSeek, fbgemm, compressed-tensors and ModelOpt write it.

    X.weight            F8_E4M3, F8_E4M3FNUZ, F8_E5M2 or F8_E5M2FNUZ (rows, cols)
    X.weight_scale_inv  or X.weight_scale, X.scale, X.qscale_weight: its scales, see convert.weights.scales
    X                   the same for fused experts (n_experts, rows, cols) without ".weight" in their names,
    X_scale_inv         or X_scale

    weight[i, j] = float32(code[i, j]) * scale[i // block_rows, j // block_cols]

The product, in float32, is the exact value rounded once. Despite its name `weight_scale_inv` multiplies; only
where quantization_config.weight_scale_semantics is "inverse" (GPTQModel) it divides. Blocks are
`weight_block_size`, or `block_structure` in a group of `config_groups`, 128x128 when there is no such key;
they can't be inferred from the grid, whose last blocks are ragged where the size doesn't divide the matrix
(kv_a_proj_with_mqa has 576 rows).

A code that is NaN (0x7F and 0xFF of e4m3fn) decodes to NaN; filling a file then reports the row.
Bytes are decoded as the type they are stored in, whatever a runtime may make of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import numpy as np

from convert.checkpoint.safetensors_file import NUMPY_DTYPES, RawTensor
from convert.weights.base import Decoded, Module, WeightsLoader
from convert.weights.scales import Block, ScaleGrid, scale_grid
from gguf_tools.errors import UnsupportedCheckpoint
from quantize.fill.sources import split_rows

FACTS = {
    "F8_E4M3": (3, 7, 0x7E),
    "F8_E4M3FNUZ": (3, 8, 0x7F),
    "F8_E5M2": (2, 15, 0x7B),
    "F8_E5M2FNUZ": (2, 16, 0x7F),
}
"""Stored type -> bits of the fraction, bias of the exponent, largest code of a plain number."""
FLOATS = tuple(FACTS)
DEFAULT_BLOCK = (128, 128)
SCALES = (".weight_scale_inv", ".weight_scale", ".scale", ".qscale_weight")
"""Suffixes of the scales beside X.weight, the first that is there counts."""
FUSED_SCALES = ("_scale_inv", "_scale")
METHODS = ("fp8", "fbgemm_fp8", "mxfp8", "compressed-tensors", "modelopt", "auto-round")

CODE_VALUES = {
    dtype: np.arange(256, dtype=np.uint8).view(NUMPY_DTYPES[dtype]).astype(np.float32) for dtype in FLOATS
}
"""Stored type -> the value of every code, float32 (256,); exact."""


@dataclass(frozen=True, slots=True)
class Fp8Weight(Decoded):
    """A matrix of 8-bit floats, or a stack of equal ones, with scales.

    codes     (rows, cols) or (n_mats, rows, cols)
    encoding  which 8-bit float the codes are
    scales    of every matrix
    divides   whether the scales divide
    """

    codes: RawTensor
    encoding: str
    scales: ScaleGrid
    divides: bool = False

    @property
    def stored_as(self) -> str:
        return f"{self.encoding} {self.scales.described}"

    def read_rows(self, start: int, stop: int) -> np.ndarray:
        # numba is loaded by the first weight that is decoded, not by looking at a checkpoint.
        from convert.weights.kernels import Float8, decode_blocks

        float8 = Float8(*FACTS[self.encoding], CODE_VALUES[self.encoding])
        codes = self.codes.read_rows(start, stop).view(np.uint8)
        rows = np.empty(codes.shape, np.float32)
        block_rows, block_cols = self.scales.block
        done = 0
        for matrix, low, high in split_rows(start, stop, self.shape[-2]):
            first = low // block_rows
            scales = self.scales.read(first, -(-high // block_rows), matrix)
            here = slice(done, done + high - low)
            decode_blocks(
                codes[here].reshape(-1), float8, scales,
                low - first * block_rows, block_rows, block_cols, self.divides, rows[here],
            )  # fmt: skip
            done = here.stop
        return rows


def _encoding(module: Module, raw: RawTensor) -> str | None:
    """Return which 8-bit float `raw` holds, None for none."""
    if raw.dtype in FLOATS:
        return raw.dtype
    # ModelOpt's first releases stored the bytes as integers.
    algorithm = module.settings.get("quant_algo")
    if raw.dtype in ("U8", "I8") and isinstance(algorithm, str) and algorithm.startswith("FP8"):
        return "F8_E4M3"
    return None


def _load(module: Module, codes: str, scales: tuple[str, ...]) -> Fp8Weight:
    """Return the weight with codes under a suffix, and scales under the first of several that is there."""
    suffix = next((suffix for suffix in scales if module.has(suffix)), scales[0])
    return fp8_weight(module, module[codes], module[suffix])


def _is_fused_fp8(module: Module) -> bool:
    return (
        not module.stem.endswith(".weight")
        and module[""].dtype in FLOATS
        and any(module.has(suffix) for suffix in FUSED_SCALES)
    )


def fp8_weight(module: Module, codes: RawTensor, scales: RawTensor) -> Fp8Weight:
    """Return a weight of 8-bit floats; CheckpointError when codes and scales don't fit each other."""
    if len(codes.shape) not in (2, 3) or not prod(codes.shape):
        raise UnsupportedCheckpoint(
            f"{codes.path}: {codes.name}: {codes.dtype} of shape {codes.shape}, expected a matrix"
        )
    encoding = _encoding(module, codes)
    if encoding is None:
        raise module.wrong(codes, f"stored as {codes.dtype}", ", ".join(FLOATS))
    inverse = scales.name.endswith("_scale_inv")
    blocks = _blocks(module)
    if not blocks and (inverse or (len(scales.shape) == 4)):
        blocks = (DEFAULT_BLOCK,)
    return Fp8Weight(
        module.name,
        codes.shape,
        codes,
        encoding,
        scale_grid(module, codes.shape, scales, blocks),
        divides=inverse and module.settings.get("weight_scale_semantics") == "inverse",
    )


def _blocks(module: Module) -> tuple[Block, ...]:
    """Return the sizes of blocks that the configuration mentions."""
    settings = module.settings
    size = settings.get("weight_block_size")
    if size is not None:
        block = _as_block(size)
        if block is None:
            raise settings.bad("weight_block_size", "two sizes such as [128, 128]")
        return (block,)
    blocks = map(_as_block, settings.of_groups("block_structure"))
    return tuple(block for block in blocks if block is not None)


def _as_block(value: object) -> Block | None:
    if isinstance(value, list) and len(value) == 2 and all(type(n) is int and n > 0 for n in value):
        return value[0], value[1]
    return None


LOADERS = (
    WeightsLoader(
        format="FP8", methods=METHODS, main=".weight", sides=SCALES,
        load=lambda module: _load(module, ".weight", SCALES),
        fits=lambda module: _encoding(module, module[".weight"]) is not None,
    ),
    WeightsLoader(
        format="FP8, fused experts", methods=METHODS, main="", sides=FUSED_SCALES, logical="",
        load=lambda module: _load(module, "", FUSED_SCALES), fits=_is_fused_fp8,
    ),
)  # fmt: skip
