"""DeepSeek's FP8: 8-bit floats with one float32 scale per block of the matrix.

    X.weight            F8_E4M3  (rows, cols)
    X.weight_scale_inv  float    (ceil(rows / block_rows), ceil(cols / block_cols))

    weight[i, j] = float32(code[i, j]) * scale[i // block_rows, j // block_cols]

The product, in float32, is the exact value rounded once. Despite its name the scale multiplies. Blocks are
`quantization_config.weight_block_size`, 128x128 when that is missing; the last ones are ragged where the size
doesn't divide the matrix (kv_a_proj_with_mqa has 576 rows), and the block size can't be inferred from the
grid for that reason. A grid larger than needed is padding; a smaller one is an error. Scales stored as
F8_E8M0, BF16 or F16 are widened to float32, which is exact.

A code that is NaN (0x7F, 0xFF) decodes to NaN; whoever fills a file from it reports the row. Modules without
codes are read by the plain loader.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from convert.checkpoint import Checkpoint
from convert.safetensors_file import NUMPY_DTYPES, RawTensor
from convert.weights.base import Weight, quantization_config
from convert.weights.plain import PlainLoader
from gguf_tools.errors import BadConfig, CheckpointError, MissingTensor, UnsupportedCheckpoint
from gguf_tools.ggml_types import F32, GGMLType

CODES = "F8_E4M3"
SCALE_SUFFIX = "_scale_inv"
DEFAULT_BLOCK = (128, 128)
_SCALE_DTYPES = ("F32", "BF16", "F16", "F8_E8M0")
# Scales of whole tensors or rows, and of blocks under another name; recognised, not read.
_OTHER_SCALES = (".weight_scale", ".scale")
# Statistics of activations that some producers leave beside the weights.
_ACTIVATION_SUFFIXES = (".input_scale", ".activation_scale")

E4M3_VALUES = np.arange(256, dtype=np.uint8).view(NUMPY_DTYPES[CODES]).astype(np.float32)
"""Code -> value, float32 (256,); exact."""


@dataclass(frozen=True, slots=True)
class Fp8BlockWeight:
    """A matrix of 8-bit codes with a grid of scales.

    codes   F8_E4M3 (rows, cols)
    scales  (at least ceil(rows / block[0]), at least ceil(cols / block[1]))
    block   rows and columns that share a scale
    """

    codes: RawTensor
    scales: RawTensor
    block: tuple[int, int]

    @property
    def name(self) -> str:
        return self.codes.name

    @property
    def shape(self) -> tuple[int, ...]:
        return self.codes.shape

    @property
    def type(self) -> GGMLType:
        return F32

    @property
    def stored_as(self) -> str:
        return f"{self.codes.dtype} in blocks of {self.block[0]}x{self.block[1]}"

    def read_rows(self, start: int, stop: int) -> np.ndarray:
        # numba is loaded by the first weight that is decoded, not by looking at a checkpoint.
        from convert.weights.kernels import decode_blocks

        codes = self.codes.read_rows(start, stop).view(np.uint8)
        first = start // self.block[0]
        scales = self.scales.read_rows(first, -(-stop // self.block[0])).astype(np.float32)
        rows = np.empty(codes.shape, np.float32)
        decode_blocks(codes, E4M3_VALUES, scales, start - first * self.block[0], *self.block, rows)
        return rows


class Fp8Loader:
    """Serves FP8 modules decoded, and the others as they are stored."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self.block = _block_size(checkpoint)
        self._plain = PlainLoader(checkpoint)
        consumed = {name + SCALE_SUFFIX for name in checkpoint.names() if checkpoint.raw(name).dtype == CODES}
        self.dropped: Mapping[str, str] = MappingProxyType({
            name: "scales activations, not weights"
            for name in checkpoint.names()
            if name.endswith(_ACTIVATION_SUFFIXES)
        })  # fmt: skip
        self._names = tuple(
            name for name in checkpoint.names() if name not in consumed and name not in self.dropped
        )

    @classmethod
    def matches(cls, checkpoint: Checkpoint) -> bool:
        if quantization_config(checkpoint).get("quant_method") not in (None, "fp8"):
            return False
        return any(checkpoint.raw(name).dtype == CODES for name in checkpoint.names())

    def names(self) -> tuple[str, ...]:
        return self._names

    def weight(self, name: str) -> Weight:
        raw = self.checkpoint.raw(name)
        if raw.dtype != CODES:
            return self._plain.weight(name)
        return Fp8BlockWeight(raw, self._scales(raw), self.block)

    def _scales(self, codes: RawTensor) -> RawTensor:
        """Return the scales of `codes` after checking that they cover it."""
        name = codes.name + SCALE_SUFFIX
        module = codes.name.removesuffix(".weight")
        if len(codes.shape) != 2:
            raise UnsupportedCheckpoint(
                f"{codes.path}: {codes.name}: {codes.dtype} of shape {codes.shape}, expected a matrix"
            )
        if name not in self.checkpoint:
            other = next((module + s for s in _OTHER_SCALES if module + s in self.checkpoint), None)
            if other is not None:
                raise UnsupportedCheckpoint(
                    f"{codes.path}: {module}: {codes.dtype} with {other}; only blocks with {name} are read"
                )
            raise MissingTensor(
                f"{codes.path}: {module}: stored as {codes.dtype} without {name}; expected the scales of its"
                " blocks (a shard may be missing)"
            )
        scales = self.checkpoint.raw(name)
        needed = tuple(-(-size // block) for size, block in zip(codes.shape, self.block, strict=True))
        if scales.dtype not in _SCALE_DTYPES:
            raise UnsupportedCheckpoint(
                f"{scales.path}: {name}: scales stored as {scales.dtype}, expected {', '.join(_SCALE_DTYPES)}"
            )
        if len(scales.shape) != 2 or scales.shape[0] < needed[0] or scales.shape[1] < needed[1]:
            raise CheckpointError(
                f"{scales.path}: {name}: shape {scales.shape}, expected {needed} for {codes.shape} in blocks"
                f" of {self.block[0]}x{self.block[1]}"
            )
        return scales


def _block_size(checkpoint: Checkpoint) -> tuple[int, int]:
    config = quantization_config(checkpoint)
    if config.get("weight_scale_semantics") == "inverse" or "weight_scale_method" in config:
        raise UnsupportedCheckpoint(
            f"{checkpoint.config_path}: quantization_config.weight_scale_method: scales that divide are not"
            " read, expected DeepSeek's, which multiply"
        )
    block = config.get("weight_block_size") or list(DEFAULT_BLOCK)
    if not isinstance(block, list) or len(block) != 2 or not all(type(n) is int and n > 0 for n in block):
        raise BadConfig(
            f"{checkpoint.config_path}: quantization_config.weight_block_size is {str(block)[:80]!r},"
            " expected two sizes such as [128, 128]"
        )
    return block[0], block[1]
