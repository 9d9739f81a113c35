"""The layouts of 4-bit floats: MXFP4, whose scales are powers of two, and NVFP4, whose scales are UE4M3."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from calibrate.rounding.base import Rounder
from calibrate.rounding.scalar.blocks import Blocks, Integers, moves, within
from calibrate.rounding.scalar.rounder import ScalarRounder
from gguf_tools.format.ggml_types import MXFP4, NVFP4, GGMLType
from quantize.formats.base import Bytes, Floats32
from quantize.formats.fp4 import mxfp4, nvfp4
from quantize.formats.fp4.codes import DOUBLED
from quantize.simd.packing import packed, unpack

LEVELS = np.concatenate([-DOUBLED[:0:-1], DOUBLED])

_STORED = np.array([*range(15, 8, -1), *range(8)], np.uint8)
"""The stored code of each level."""

_LEVEL_OF = np.array([7 + code if code < 8 else 15 - code for code in range(16)], np.uint8)
"""The number of the level of each stored code; 8, a zero with a sign, is the level 0 too."""


@dataclass(frozen=True)
class SmallFloats:
    """A layout (scalar.blocks.Layout) of 4-bit floats; and

    block   the dtype of a block
    scale   the field of its scales, one byte for each sub-block
    slopes  turns these bytes into slopes
    top     the largest of them
    """

    type: GGMLType
    sub_elems: int
    block: np.dtype[Any]
    scale: str
    slopes: Callable[[Integers], Floats32]
    top: int

    @property
    def levels(self) -> Floats32:
        return LEVELS

    @property
    def is_refitted(self) -> bool:
        return False

    def read(self, data: Bytes) -> Blocks:
        n_rows = len(data)
        fields = np.ascontiguousarray(data).reshape(-1).view(self.block)
        scales = fields[self.scale].astype(np.int32).reshape(n_rows, -1)
        ones = np.ones((n_rows, 1), np.float32)
        levels = _LEVEL_OF[unpack(fields["qs"], 4, self.sub_elems // 2)].reshape(n_rows, -1)
        return Blocks(ones, np.zeros_like(ones), scales, np.zeros_like(scales), levels)

    def write(self, blocks: Blocks) -> Bytes:
        n_rows = len(blocks.scales)
        fields = np.zeros(blocks.codes.size // self.type.block_elems, self.block)
        fields[self.scale] = blocks.scales.reshape(fields[self.scale].shape)
        codes = _STORED[blocks.codes].reshape(len(fields), -1)
        fields["qs"] = packed(codes, 4, self.sub_elems // 2)
        return fields.view(np.uint8).reshape(n_rows, -1)

    def lines(self, blocks: Blocks) -> tuple[Floats32, Floats32]:
        slopes = self.slopes(blocks.scales)
        return slopes, np.zeros_like(slopes)

    def begin(self, stock: Blocks) -> Blocks:
        return stock

    def neighbours(self, blocks: Blocks, window: int) -> Blocks:
        scales = within(blocks.scales + moves(window, 0)[0], 0, self.top)
        return Blocks(blocks.d[None], blocks.dmin[None], scales, blocks.lows[None], blocks.codes)


def _powers_of_two(exponents: Integers) -> Floats32:
    powers: Floats32 = np.ldexp(np.float32(1), exponents - 128)
    return powers


LAYOUTS = (
    SmallFloats(MXFP4, 32, mxfp4.BLOCK, "e", _powers_of_two, 255),
    SmallFloats(NVFP4, 16, nvfp4.BLOCK, "d", nvfp4.half_scales, nvfp4.LARGEST_BYTE),
)

ROUNDERS: Mapping[str, Rounder] = {layout.type.name: ScalarRounder(layout) for layout in LAYOUTS}
