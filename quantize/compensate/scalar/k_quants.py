"""The K-quants as layouts: integer scales, and minimums, under one float16 each of the super-block."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from gguf_tools.ggml_types import Q2_K, Q4_K, GGMLType
from quantize.compensate.base import Rounder
from quantize.compensate.scalar.blocks import Blocks, Codes, Integers
from quantize.compensate.scalar.rounder import ScalarRounder
from quantize.formats.base import Bytes, Floats32
from quantize.formats.k_quants import q2_k, q4_k
from quantize.simd.half import halves_to_float32
from quantize.simd.packing import packed, packed_scales, unpack, unpacked_scales

Fields = npt.NDArray[Any]
"""(n,) of the type's BLOCK."""


@dataclass(frozen=True)
class SuperBlocks:
    """The layout of a K-quant; fields and methods of compensate.scalar.blocks.Layout, and

    block             the dtype of a block
    read_rest         returns scales, lows and codes of blocks
    write_rest        puts them there
    scale_range       the least and the largest integer scale
    low_top           the largest integer minimum; 0 where there are none
    """

    type: GGMLType
    sub_elems: int
    lowest: int
    highest: int
    scale_range: tuple[int, int]
    low_top: int
    block: np.dtype[Any]
    read_rest: Callable[[Fields], tuple[Integers, Integers, Codes]]
    write_rest: Callable[[Fields, Blocks], None]

    def read(self, data: Bytes) -> Blocks:
        fields = data.reshape(-1).view(self.block)
        d = halves_to_float32(fields["d"])
        dmin = halves_to_float32(fields["dmin"]) if self.low_top else np.zeros_like(d)
        return Blocks(d, dmin, *self.read_rest(fields))

    def write(self, blocks: Blocks) -> Bytes:
        fields = np.zeros(len(blocks.d), self.block)
        fields["d"] = blocks.d.astype(np.float16).view(np.uint16)
        if self.low_top:
            fields["dmin"] = blocks.dmin.astype(np.float16).view(np.uint16)
        self.write_rest(fields, blocks)
        return fields.view(np.uint8).reshape(len(fields), -1)

    def lines(self, blocks: Blocks) -> tuple[Floats32, Floats32]:
        slopes = blocks.d[:, None] * blocks.scales.astype(np.float32)
        return slopes, blocks.dmin[:, None] * blocks.lows.astype(np.float32)

    def neighbours(self, blocks: Blocks, window: int) -> Sequence[Blocks]:
        lows = range(-window, window + 1) if self.low_top else (0,)
        moves = sorted(
            ((up, low) for up in range(-window, window + 1) for low in lows),
            key=lambda move: abs(move[0]) + abs(move[1]),
        )
        return [
            replace(
                blocks,
                scales=np.clip(blocks.scales + up, *self.scale_range),
                lows=np.clip(blocks.lows + low, 0, self.low_top),
            )
            for up, low in moves
        ]


def _read_q2_k(fields: Fields) -> tuple[Integers, Integers, Codes]:
    both = fields["scales"].astype(np.int32)
    return both & 0xF, both >> 4, unpack(fields["qs"], 2, 32)


def _write_q2_k(fields: Fields, blocks: Blocks) -> None:
    fields["scales"] = blocks.scales | blocks.lows << 4
    fields["qs"] = packed(blocks.codes, 2, 32)


def _read_q4_k(fields: Fields) -> tuple[Integers, Integers, Codes]:
    return *unpacked_scales(fields["scales"]), unpack(fields["qs"], 4, 32)


def _write_q4_k(fields: Fields, blocks: Blocks) -> None:
    fields["scales"] = packed_scales(blocks.scales, blocks.lows)
    fields["qs"] = packed(blocks.codes, 4, 32)


_LAYOUTS = (
    SuperBlocks(Q2_K, 16, 0, 3, (0, 15), 15, q2_k.BLOCK, _read_q2_k, _write_q2_k),
    SuperBlocks(Q4_K, 32, 0, 15, (0, 63), 63, q4_k.BLOCK, _read_q4_k, _write_q4_k),
)

ROUNDERS: Mapping[str, Rounder] = {layout.type.name: ScalarRounder(layout) for layout in _LAYOUTS}
