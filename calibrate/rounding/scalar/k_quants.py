"""Layouts with integer scales, and minimums, under one float16 each of a super-block: K-quants and IQ4_XS."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from calibrate.rounding.base import Rounder
from calibrate.rounding.scalar.blocks import Blocks, Codes, Fields, Integers, halves, integers, moves, within
from calibrate.rounding.scalar.rounder import ScalarRounder
from gguf_tools.format.ggml_types import IQ4_XS, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, GGMLType
from quantize.formats.base import Bytes, Floats32
from quantize.formats.iq import iq4, iq4_xs
from quantize.formats.k_quants import q2_k, q3_k, q4_k, q5_k, q6_k
from quantize.simd.floats import halves_to_float32
from quantize.simd.packing import packed, packed_scales, unpack, unpacked_scales

Rest = tuple[Integers, Integers, Codes]
"""Scales, minimums and codes."""


@dataclass(frozen=True, eq=False)
class SuperBlocks:
    """A layout (scalar.blocks.Layout) with integer scales; and

    block        the dtype of a block
    read_rest    takes scales, minimums and codes out of blocks
    write_rest   puts them there
    scale_range  the least and the largest integer scale
    low_top      the largest integer minimum; 0 where there are none
    """

    type: GGMLType
    sub_elems: int
    levels: Floats32
    scale_range: tuple[int, int]
    low_top: int
    block: np.dtype[Any]
    read_rest: Callable[[Fields], Rest]
    write_rest: Callable[[Fields, Blocks], None]

    @property
    def is_refitted(self) -> bool:
        return self.low_top > 0  # where there are two numbers to fit; one gains 1 % at most

    def read(self, data: Bytes) -> Blocks:
        fields = data.reshape(-1).view(self.block)
        d = halves_to_float32(fields["d"])[:, None]
        dmin = halves_to_float32(fields["dmin"])[:, None] if self.low_top else np.zeros_like(d)
        return Blocks(d, dmin, *self.read_rest(fields))

    def write(self, blocks: Blocks) -> Bytes:
        fields = np.zeros(len(blocks.d), self.block)
        fields["d"] = halves(blocks.d[:, 0])
        if self.low_top:
            fields["dmin"] = halves(blocks.dmin[:, 0])
        self.write_rest(fields, blocks)
        return fields.view(np.uint8).reshape(len(fields), -1)

    def lines(self, blocks: Blocks) -> tuple[Floats32, Floats32]:
        slopes = blocks.d * blocks.scales.astype(np.float32)
        return slopes, blocks.dmin * blocks.lows.astype(np.float32)

    def begin(self, stock: Blocks) -> Blocks:
        return stock

    def neighbours(self, blocks: Blocks, window: int) -> Blocks:
        ups, downs = moves(window, window if self.low_top else 0)
        scales = within(blocks.scales + ups, *self.scale_range)
        lows = within(blocks.lows + downs, 0, self.low_top) if self.low_top else blocks.lows[None]
        return Blocks(blocks.d[None], blocks.dmin[None], scales, lows, blocks.codes)


# ---- the fields of each type


def _read_q2_k(fields: Fields) -> Rest:
    both = fields["scales"].astype(np.int32)
    return both & 0xF, both >> 4, unpack(fields["qs"], 2, 32)


def _write_q2_k(fields: Fields, blocks: Blocks) -> None:
    fields["scales"] = blocks.scales | blocks.lows << 4
    fields["qs"] = packed(blocks.codes, 2, 32)


def _read_q3_k(fields: Fields) -> Rest:
    lower, upper = unpack(fields["scales"][:, :8], 4, 8), unpack(fields["scales"][:, 8:], 2, 4)
    scales = (lower | upper << 4).astype(np.int32) - 32
    codes = unpack(fields["qs"], 2, 32) | unpack(fields["hmask"], 1, 32) << 2
    return scales, np.zeros_like(scales), codes


def _write_q3_k(fields: Fields, blocks: Blocks) -> None:
    scales = (blocks.scales + 32).astype(np.uint8)
    fields["scales"][:, :8] = packed(scales & 0xF, 4, 8)
    fields["scales"][:, 8:] = packed(scales >> 4, 2, 4)
    fields["qs"] = packed(blocks.codes & 3, 2, 32)
    fields["hmask"] = packed(blocks.codes >> 2, 1, 32)


def _read_q4_k(fields: Fields) -> Rest:
    return *unpacked_scales(fields["scales"]), unpack(fields["qs"], 4, 32)


def _write_q4_k(fields: Fields, blocks: Blocks) -> None:
    fields["scales"] = packed_scales(blocks.scales, blocks.lows)
    fields["qs"] = packed(blocks.codes, 4, 32)


def _read_q5_k(fields: Fields) -> Rest:
    codes = unpack(fields["qs"], 4, 32) | unpack(fields["qh"], 1, 32) << 4
    return *unpacked_scales(fields["scales"]), codes


def _write_q5_k(fields: Fields, blocks: Blocks) -> None:
    fields["scales"] = packed_scales(blocks.scales, blocks.lows)
    fields["qs"] = packed(blocks.codes & 0xF, 4, 32)
    fields["qh"] = packed(blocks.codes >> 4, 1, 32)


def _read_q6_k(fields: Fields) -> Rest:
    scales = fields["scales"].astype(np.int32)
    return scales, np.zeros_like(scales), unpack(fields["ql"], 4, 64) | unpack(fields["qh"], 2, 32) << 4


def _write_q6_k(fields: Fields, blocks: Blocks) -> None:
    fields["scales"] = blocks.scales
    fields["ql"] = packed(blocks.codes & 0xF, 4, 64)
    fields["qh"] = packed(blocks.codes >> 4, 2, 32)


def _read_iq4_xs(fields: Fields) -> Rest:
    lower = fields["scales_l"]
    lower = np.stack([lower & 0xF, lower >> 4], axis=2).reshape(-1, 8)
    upper = fields["scales_h"][:, None] >> np.arange(0, 16, 2, dtype=np.uint16) & 3
    scales = (lower | upper << 4).astype(np.int32) - 32
    return scales, np.zeros_like(scales), unpack(fields["qs"], 4, 16)


def _write_iq4_xs(fields: Fields, blocks: Blocks) -> None:
    scales = blocks.scales + 32
    fields["scales_l"] = scales[:, ::2] & 0xF | (scales[:, 1::2] & 0xF) << 4
    fields["scales_h"] = np.bitwise_or.reduce(scales >> 4 << np.arange(0, 16, 2), axis=1)
    fields["qs"] = packed(blocks.codes, 4, 16)


LAYOUTS = (
    SuperBlocks(Q2_K, 16, integers(0, 3), (0, 15), 15, q2_k.BLOCK, _read_q2_k, _write_q2_k),
    SuperBlocks(Q3_K, 16, integers(-4, 3), (-32, 31), 0, q3_k.BLOCK, _read_q3_k, _write_q3_k),
    SuperBlocks(Q4_K, 32, integers(0, 15), (0, 63), 63, q4_k.BLOCK, _read_q4_k, _write_q4_k),
    SuperBlocks(Q5_K, 32, integers(0, 31), (0, 63), 63, q5_k.BLOCK, _read_q5_k, _write_q5_k),
    SuperBlocks(Q6_K, 16, integers(-32, 31), (-128, 127), 0, q6_k.BLOCK, _read_q6_k, _write_q6_k),
    SuperBlocks(IQ4_XS, 32, iq4.LEVELS, (-32, 31), 0, iq4_xs.BLOCK, _read_iq4_xs, _write_iq4_xs),
)

ROUNDERS: Mapping[str, Rounder] = {layout.type.name: ScalarRounder(layout) for layout in LAYOUTS}
