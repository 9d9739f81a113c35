"""The layouts of all types whose weights are rounded one by one, and their rounders.

K-quants and IQ4_XS have integer scales, and minimums, under one float16 each of a super-block.

Blocks of 32 and ternary types have one float16 scale a block, and perhaps one float16 minimum. A scale has no
integer to count steps in. A step is a share of the scale, and of a minimum the same share of the distance
between two levels; small ones, so a window is several of them.

4-bit floats are MXFP4, whose scales are powers of two, and NVFP4, whose scales are UE4M3.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from gguf_tools.format.ggml_types import (
    IQ4_NL,
    IQ4_XS,
    MXFP4,
    NVFP4,
    Q2_K,
    Q3_K,
    Q4_0,
    Q4_1,
    Q4_K,
    Q5_0,
    Q5_1,
    Q5_K,
    Q6_K,
    Q8_0,
    TQ1_0,
    TQ2_0,
    GGMLType,
)
from quantize.formats.base import Bytes, Floats32, block_dtype
from quantize.formats.fp4 import DOUBLED, LARGEST_BYTE, half_scales
from quantize.formats.iq import iq4_search
from quantize.rounding.base import Rounder
from quantize.rounding.scalar.blocks import (
    Codes,
    Fields,
    Integers,
    ScalarBlocks,
    ScalarLayout,
    as_half,
    halves,
    integers,
    moves,
    within,
)
from quantize.rounding.scalar.rounder import ScalarRounder
from quantize.simd.floats import halves_to_float32
from quantize.simd.packing import packed, packed_scales, unpack, unpacked_scales

Rest = tuple[Integers, Integers, Codes]
"""Scales, minimums and codes."""


@dataclass(frozen=True, eq=False)
class SuperBlocks:
    """A layout (scalar.blocks.Layout) with integer scales; and

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
    read_rest: Callable[[Fields], Rest]
    write_rest: Callable[[Fields, ScalarBlocks], None]

    @property
    def is_refitted(self) -> bool:
        return self.low_top > 0  # where there are two numbers to fit; one gains 1 % at most

    def read(self, data: Bytes) -> ScalarBlocks:
        fields = data.reshape(-1).view(block_dtype(self.type))
        d = halves_to_float32(fields["d"])[:, None]
        dmin = halves_to_float32(fields["dmin"])[:, None] if self.low_top else np.zeros_like(d)
        return ScalarBlocks(d, dmin, *self.read_rest(fields))

    def write(self, blocks: ScalarBlocks) -> Bytes:
        fields = np.zeros(len(blocks.d), block_dtype(self.type))
        fields["d"] = halves(blocks.d[:, 0])
        if self.low_top:
            fields["dmin"] = halves(blocks.dmin[:, 0])
        self.write_rest(fields, blocks)
        return fields.view(np.uint8).reshape(len(fields), -1)

    def lines(self, blocks: ScalarBlocks) -> tuple[Floats32, Floats32]:
        slopes = blocks.d * blocks.scales.astype(np.float32)
        return slopes, blocks.dmin * blocks.lows.astype(np.float32)

    def begin(self, stock: ScalarBlocks) -> ScalarBlocks:
        return stock

    def neighbours(self, blocks: ScalarBlocks, window: int) -> ScalarBlocks:
        ups, downs = moves(window, window if self.low_top else 0)
        scales = within(blocks.scales + ups, *self.scale_range)
        lows = within(blocks.lows + downs, 0, self.low_top) if self.low_top else blocks.lows[None]
        return ScalarBlocks(blocks.d[None], blocks.dmin[None], scales, lows, blocks.codes)


# ---- the fields of each type


def _read_q2_k(fields: Fields) -> Rest:
    both = fields["scales"].astype(np.int32)
    return both & 0xF, both >> 4, unpack(fields["qs"], 2, 32)


def _write_q2_k(fields: Fields, blocks: ScalarBlocks) -> None:
    fields["scales"] = blocks.scales | blocks.lows << 4
    fields["qs"] = packed(blocks.codes, 2, 32)


def _read_q3_k(fields: Fields) -> Rest:
    lower, upper = unpack(fields["scales"][:, :8], 4, 8), unpack(fields["scales"][:, 8:], 2, 4)
    scales = (lower | upper << 4).astype(np.int32) - 32
    codes = unpack(fields["qs"], 2, 32) | unpack(fields["hmask"], 1, 32) << 2
    return scales, np.zeros_like(scales), codes


def _write_q3_k(fields: Fields, blocks: ScalarBlocks) -> None:
    scales = (blocks.scales + 32).astype(np.uint8)
    fields["scales"][:, :8] = packed(scales & 0xF, 4, 8)
    fields["scales"][:, 8:] = packed(scales >> 4, 2, 4)
    fields["qs"] = packed(blocks.codes & 3, 2, 32)
    fields["hmask"] = packed(blocks.codes >> 2, 1, 32)


def _read_q4_k(fields: Fields) -> Rest:
    return *unpacked_scales(fields["scales"]), unpack(fields["qs"], 4, 32)


def _write_q4_k(fields: Fields, blocks: ScalarBlocks) -> None:
    fields["scales"] = packed_scales(blocks.scales, blocks.lows)
    fields["qs"] = packed(blocks.codes, 4, 32)


def _read_q5_k(fields: Fields) -> Rest:
    codes = unpack(fields["qs"], 4, 32) | unpack(fields["qh"], 1, 32) << 4
    return *unpacked_scales(fields["scales"]), codes


def _write_q5_k(fields: Fields, blocks: ScalarBlocks) -> None:
    fields["scales"] = packed_scales(blocks.scales, blocks.lows)
    fields["qs"] = packed(blocks.codes & 0xF, 4, 32)
    fields["qh"] = packed(blocks.codes >> 4, 1, 32)


def _read_q6_k(fields: Fields) -> Rest:
    scales = fields["scales"].astype(np.int32)
    return scales, np.zeros_like(scales), unpack(fields["ql"], 4, 64) | unpack(fields["qh"], 2, 32) << 4


def _write_q6_k(fields: Fields, blocks: ScalarBlocks) -> None:
    fields["scales"] = blocks.scales
    fields["ql"] = packed(blocks.codes & 0xF, 4, 64)
    fields["qh"] = packed(blocks.codes >> 4, 2, 32)


def _read_iq4_xs(fields: Fields) -> Rest:
    lower = unpack(fields["scales_l"], 4, 1)
    upper = fields["scales_h"][:, None] >> np.arange(0, 16, 2, dtype=np.uint16) & 3
    scales = (lower | upper << 4).astype(np.int32) - 32
    return scales, np.zeros_like(scales), unpack(fields["qs"], 4, 16)


def _write_iq4_xs(fields: Fields, blocks: ScalarBlocks) -> None:
    scales = blocks.scales + 32
    fields["scales_l"] = packed(scales & 0xF, 4, 1)
    fields["scales_h"] = np.bitwise_or.reduce(scales >> 4 << np.arange(0, 16, 2), axis=1)
    fields["qs"] = packed(blocks.codes, 4, 16)


SUPER_BLOCKS = (
    SuperBlocks(Q2_K, 16, integers(0, 3), (0, 15), 15, _read_q2_k, _write_q2_k),
    SuperBlocks(Q3_K, 16, integers(-4, 3), (-32, 31), 0, _read_q3_k, _write_q3_k),
    SuperBlocks(Q4_K, 32, integers(0, 15), (0, 63), 63, _read_q4_k, _write_q4_k),
    SuperBlocks(Q5_K, 32, integers(0, 31), (0, 63), 63, _read_q5_k, _write_q5_k),
    SuperBlocks(Q6_K, 16, integers(-32, 31), (-128, 127), 0, _read_q6_k, _write_q6_k),
    SuperBlocks(IQ4_XS, 32, iq4_search.LEVELS, (-32, 31), 0, _read_iq4_xs, _write_iq4_xs),
)


@dataclass(frozen=True, eq=False)
class SingleScales:
    """A layout (scalar.blocks.Layout) with a float16 scale; and

    read_codes   takes the codes out of blocks
    write_codes  puts them there
    step         a step, as a share of the scale
    shrink       what the stock encoder's scale is multiplied by to begin with: in ternary types it is the
                 largest magnitude, which is far too much for weights that are not ternary themselves
    """

    type: GGMLType
    levels: Floats32
    read_codes: Callable[[Fields], Codes]
    write_codes: Callable[[Fields, Codes], None]
    step: float
    shrink: float = 1.0

    @property
    def sub_elems(self) -> int:
        return self.type.block_elems

    @property
    def is_refitted(self) -> bool:
        return False

    @property
    def has_lows(self) -> bool:
        return "m" in (block_dtype(self.type).names or ())

    def read(self, data: Bytes) -> ScalarBlocks:
        n_rows = len(data)
        fields = np.ascontiguousarray(data).reshape(-1).view(block_dtype(self.type))
        d = halves_to_float32(fields["d"]).reshape(n_rows, -1)
        dmin = -halves_to_float32(fields["m"]).reshape(n_rows, -1) if self.has_lows else np.zeros_like(d)
        ones = np.ones(d.shape, np.int32)
        return ScalarBlocks(d, dmin, ones, ones, self.read_codes(fields).reshape(n_rows, -1))

    def write(self, blocks: ScalarBlocks) -> Bytes:
        fields = np.zeros(blocks.d.size, block_dtype(self.type))
        fields["d"] = halves(blocks.d).reshape(-1)
        if self.has_lows:
            fields["m"] = halves(-blocks.dmin).reshape(-1)
        self.write_codes(fields, blocks.codes.reshape(len(fields), -1))
        return fields.view(np.uint8).reshape(len(blocks.d), -1)

    def lines(self, blocks: ScalarBlocks) -> tuple[Floats32, Floats32]:
        return blocks.d, blocks.dmin

    def begin(self, stock: ScalarBlocks) -> ScalarBlocks:
        return replace(stock, d=as_half(stock.d * np.float32(self.shrink)))

    def neighbours(self, blocks: ScalarBlocks, window: int) -> ScalarBlocks:
        step = np.float32(self.step)
        ups, downs = moves(*(min(2 * window, 3),) * 2) if self.has_lows else moves(5 * window, 0)
        d = as_half(blocks.d * (1 + step * ups.astype(np.float32)))
        dmin = blocks.dmin[None]
        if self.has_lows:
            dmin = as_half(dmin + blocks.d * step * downs.astype(np.float32))
        return ScalarBlocks(d, dmin, blocks.scales[None], blocks.lows[None], blocks.codes)


# ---- the codes of each type


def _read_4_bits(fields: Fields) -> Codes:
    return unpack(fields["qs"], 4, 16)


def _write_4_bits(fields: Fields, codes: Codes) -> None:
    fields["qs"] = packed(codes & 0xF, 4, 16)


def _read_5_bits(fields: Fields) -> Codes:
    upper = np.unpackbits(fields["qh"][:, None].view(np.uint8), axis=1, bitorder="little")
    return unpack(fields["qs"], 4, 16) | upper << 4


def _write_5_bits(fields: Fields, codes: Codes) -> None:
    _write_4_bits(fields, codes)
    fields["qh"] = np.packbits(codes >> 4, axis=1, bitorder="little").view("<u4")[:, 0]


def _read_q8_0(fields: Fields) -> Codes:
    return (fields["qs"].view(np.uint8) ^ 0x80).astype(np.uint8)


def _write_q8_0(fields: Fields, codes: Codes) -> None:
    fields["qs"] = (codes ^ 0x80).view(np.int8)


def _read_tq2_0(fields: Fields) -> Codes:
    return unpack(fields["qs"], 2, 32)


def _write_tq2_0(fields: Fields, codes: Codes) -> None:
    fields["qs"] = packed(codes, 2, 32)


_DIGITS = ((0, 32, 5), (32, 48, 5), (48, 52, 4))
"""Bytes of TQ1_0's codes, and how many each holds: the first and last byte of a field, and its digits."""


def _read_tq1_0(fields: Fields) -> Codes:
    data = np.concatenate([fields["qs"], fields["qh"]], axis=1).astype(np.int32)
    parts = []
    for start, stop, digits in _DIGITS:
        rest: Integers = data[:, start:stop]
        for _ in range(digits):
            parts.append((rest * 3 >> 8).astype(np.uint8))
            rest = (rest * 3 & 0xFF).astype(np.int32)
    return np.concatenate(parts, axis=1)


def _write_tq1_0(fields: Fields, codes: Codes) -> None:
    parts, first = [], 0
    for start, stop, digits in _DIGITS:
        size = stop - start
        number = np.zeros((len(codes), size), np.int32)
        for n in range(5):
            number *= 3
            if n < digits:
                number += codes[:, first + n * size : first + (n + 1) * size]
        parts.append(-(number * -256 // 243))
        first += digits * size
    data = np.concatenate(parts, axis=1).astype(np.uint8)
    fields["qs"], fields["qh"] = data[:, :48], data[:, 48:]


SINGLE_SCALES = (
    SingleScales(Q4_0, integers(-8, 7), _read_4_bits, _write_4_bits, 0.02),
    SingleScales(Q4_1, integers(0, 15), _read_4_bits, _write_4_bits, 0.04),
    SingleScales(Q5_0, integers(-16, 15), _read_5_bits, _write_5_bits, 0.01),
    SingleScales(Q5_1, integers(0, 31), _read_5_bits, _write_5_bits, 0.02),
    SingleScales(Q8_0, integers(-128, 127), _read_q8_0, _write_q8_0, 0.003),
    SingleScales(IQ4_NL, iq4_search.LEVELS, _read_4_bits, _write_4_bits, 0.02),
    SingleScales(TQ1_0, integers(-1, 1), _read_tq1_0, _write_tq1_0, 0.1, 0.5),
    SingleScales(TQ2_0, integers(-1, 1), _read_tq2_0, _write_tq2_0, 0.1, 0.5),
)


FP4_LEVELS = np.concatenate([-DOUBLED[:0:-1], DOUBLED])

_STORED = np.array([*range(15, 8, -1), *range(8)], np.uint8)
"""The stored code of each level."""

_LEVEL_OF = np.array([7 + code if code < 8 else 15 - code for code in range(16)], np.uint8)
"""The number of the level of each stored code; 8, a zero with a sign, is the level 0 too."""


@dataclass(frozen=True)
class SmallFloats:
    """A layout (scalar.blocks.Layout) of 4-bit floats; and

    scale   the field of its scales, one byte for each sub-block
    slopes  turns these bytes into slopes
    top     the largest of them
    """

    type: GGMLType
    sub_elems: int
    scale: str
    slopes: Callable[[Integers], Floats32]
    top: int

    @property
    def levels(self) -> Floats32:
        return FP4_LEVELS

    @property
    def is_refitted(self) -> bool:
        return False

    def read(self, data: Bytes) -> ScalarBlocks:
        n_rows = len(data)
        fields = np.ascontiguousarray(data).reshape(-1).view(block_dtype(self.type))
        scales = fields[self.scale].astype(np.int32).reshape(n_rows, -1)
        ones = np.ones((n_rows, 1), np.float32)
        levels = _LEVEL_OF[unpack(fields["qs"], 4, self.sub_elems // 2)].reshape(n_rows, -1)
        return ScalarBlocks(ones, np.zeros_like(ones), scales, np.zeros_like(scales), levels)

    def write(self, blocks: ScalarBlocks) -> Bytes:
        n_rows = len(blocks.scales)
        fields = np.zeros(blocks.codes.size // self.type.block_elems, block_dtype(self.type))
        fields[self.scale] = blocks.scales.reshape(fields[self.scale].shape)
        codes = _STORED[blocks.codes].reshape(len(fields), -1)
        fields["qs"] = packed(codes, 4, self.sub_elems // 2)
        return fields.view(np.uint8).reshape(n_rows, -1)

    def lines(self, blocks: ScalarBlocks) -> tuple[Floats32, Floats32]:
        slopes = self.slopes(blocks.scales)
        return slopes, np.zeros_like(slopes)

    def begin(self, stock: ScalarBlocks) -> ScalarBlocks:
        return stock

    def neighbours(self, blocks: ScalarBlocks, window: int) -> ScalarBlocks:
        scales = within(blocks.scales + moves(window, 0)[0], 0, self.top)
        return ScalarBlocks(blocks.d[None], blocks.dmin[None], scales, blocks.lows[None], blocks.codes)


def _powers_of_two(exponents: Integers) -> Floats32:
    powers: Floats32 = np.ldexp(np.float32(1), exponents - 128)
    return powers


SMALL_FLOATS = (
    SmallFloats(MXFP4, 32, "e", _powers_of_two, 255),
    SmallFloats(NVFP4, 16, "d", half_scales, LARGEST_BYTE),
)

LAYOUTS: tuple[ScalarLayout, ...] = (*SUPER_BLOCKS, *SINGLE_SCALES, *SMALL_FLOATS)

SCALAR_ROUNDERS: Sequence[Rounder] = tuple(map(ScalarRounder, LAYOUTS))
