"""The layouts of 4-bit floats: MXFP4, whose scales are powers of two, and NVFP4, whose scales are UE4M3."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from calibrate.rounding.base import Rounder
from calibrate.rounding.scalar.blocks import Blocks, Codes, Integers, moves, within
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
class _Exponents:
    """MXFP4: a power of two for 32 weights."""

    type: GGMLType = MXFP4
    sub_elems: int = 32

    @property
    def levels(self) -> Floats32:
        return LEVELS

    @property
    def is_refitted(self) -> bool:
        return False

    def read(self, data: Bytes) -> Blocks:
        fields = np.ascontiguousarray(data).reshape(-1).view(mxfp4.BLOCK)
        return _blocks(len(data), fields["e"].astype(np.int32), unpack(fields["qs"], 4, 16))

    def write(self, blocks: Blocks) -> Bytes:
        fields = np.zeros(blocks.scales.size, mxfp4.BLOCK)
        fields["e"] = blocks.scales.reshape(-1)
        fields["qs"] = packed(_STORED[blocks.codes].reshape(-1, 32), 4, 16)
        return fields.view(np.uint8).reshape(len(blocks.scales), -1)

    def lines(self, blocks: Blocks) -> tuple[Floats32, Floats32]:
        slopes = np.ldexp(np.float32(1), blocks.scales - 128)
        return slopes, np.zeros_like(slopes)

    def begin(self, stock: Blocks) -> Blocks:
        return stock

    def neighbours(self, blocks: Blocks, window: int) -> Blocks:
        return _scaled(blocks, window, 255)


@dataclass(frozen=True)
class _SmallFloats:
    """NVFP4: a float of 8 bits for 16 weights."""

    type: GGMLType = NVFP4
    sub_elems: int = 16

    @property
    def levels(self) -> Floats32:
        return LEVELS

    @property
    def is_refitted(self) -> bool:
        return False

    def read(self, data: Bytes) -> Blocks:
        fields = np.ascontiguousarray(data).reshape(-1).view(nvfp4.BLOCK)
        return _blocks(len(data), fields["d"].astype(np.int32), unpack(fields["qs"], 4, 8))

    def write(self, blocks: Blocks) -> Bytes:
        fields = np.zeros(blocks.scales.size // 4, nvfp4.BLOCK)
        fields["d"] = blocks.scales.reshape(-1, 4)
        fields["qs"] = packed(_STORED[blocks.codes].reshape(-1, 64), 4, 8)
        return fields.view(np.uint8).reshape(len(blocks.scales), -1)

    def lines(self, blocks: Blocks) -> tuple[Floats32, Floats32]:
        slopes = nvfp4.half_scales(blocks.scales)
        return slopes, np.zeros_like(slopes)

    def begin(self, stock: Blocks) -> Blocks:
        return stock

    def neighbours(self, blocks: Blocks, window: int) -> Blocks:
        return _scaled(blocks, window, nvfp4.LARGEST_BYTE)


def _blocks(n_rows: int, scales: Integers, codes: Codes) -> Blocks:
    """Return the blocks of rows with integer scales, with the numbers of levels for stored codes."""
    scales = scales.reshape(n_rows, -1)
    ones = np.ones((n_rows, 1), np.float32)
    levels = _LEVEL_OF[codes].reshape(n_rows, -1)
    return Blocks(ones, np.zeros_like(ones), scales, np.zeros_like(scales), levels)


def _scaled(blocks: Blocks, window: int, top: int) -> Blocks:
    scales = within(blocks.scales + moves(window, 0)[0], 0, top)
    return Blocks(blocks.d[None], blocks.dmin[None], scales, blocks.lows[None], blocks.codes)


LAYOUTS = (_Exponents(), _SmallFloats())

ROUNDERS: Mapping[str, Rounder] = {layout.type.name: ScalarRounder(layout) for layout in LAYOUTS}
