"""The layouts of all types whose weights are rounded one by one, and their rounders.

K-quants and IQ4_XS have integer scales, and minimums, under one float16 each of a super-block.

Blocks of 32 and ternary types have one float16 scale a block, and perhaps one float16 minimum. A scale has no
integer to count steps in. A step is a share of the scale, and of a minimum the same share of the distance
between two levels; small ones, so a window is several of them.

4-bit floats are MXFP4, whose scales are powers of two, and NVFP4, whose scales are UE4M3.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

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
from quantize.formats.bits import Numbers, numbers_of
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

FP4_LEVELS = np.concatenate([-DOUBLED[:0:-1], DOUBLED])

_LEVELS: Mapping[str, Floats32] = {
    "IQ4_XS": iq4_search.LEVELS,
    "IQ4_NL": iq4_search.LEVELS,
    "TQ1_0": integers(-1, 1),
    "TQ2_0": integers(-1, 1),
    "MXFP4": FP4_LEVELS,
    "NVFP4": FP4_LEVELS,
}
"""Of the types whose codes do not stand for all integers from the lowest to the highest."""


def _fields(type_: GGMLType, data: Bytes) -> Fields:
    return np.ascontiguousarray(data).reshape(-1).view(block_dtype(type_))


def _bytes(fields: Fields) -> Bytes:
    """Show blocks as bytes, (n, bytes of a block), to read or to write."""
    return fields.view(np.uint8).reshape(len(fields), -1)


@dataclass(frozen=True, eq=False)
class _Layout:
    """Part that all layouts (scalar.blocks.ScalarLayout) share: a type, and its bits by the table."""

    type: GGMLType

    @cached_property
    def levels(self) -> Floats32:
        if self.type.name in _LEVELS:
            return _LEVELS[self.type.name]
        return integers(self.numbers["codes"].lowest, self.numbers["codes"].highest)

    @cached_property
    def numbers(self) -> Mapping[str, Numbers]:
        return numbers_of(self.type)

    @cached_property
    def sub_elems(self) -> int:
        n_scales = len(self.numbers["scales"].positions) if "scales" in self.numbers else 1
        return self.type.block_elems // n_scales

    @property
    def is_refitted(self) -> bool:
        return False

    def begin(self, stock: ScalarBlocks) -> ScalarBlocks:
        return stock


class SuperBlocks(_Layout):
    """A layout with integer scales, and minimums where the type has them."""

    @property
    def low_top(self) -> int:
        """The largest integer minimum; 0 where there are none."""
        return self.numbers["lows"].highest if "lows" in self.numbers else 0

    @property
    def is_refitted(self) -> bool:
        return self.low_top > 0  # where there are two numbers to fit; one gains 1 % at most

    def read(self, data: Bytes) -> ScalarBlocks:
        fields = _fields(self.type, data)
        stored = {name: each.read(_bytes(fields)) for name, each in self.numbers.items()}
        d = halves_to_float32(fields["d"])[:, None]
        dmin = halves_to_float32(fields["dmin"])[:, None] if self.low_top else np.zeros_like(d)
        scales = stored["scales"].astype(np.int32) + self.numbers["scales"].lowest
        lows = stored["lows"].astype(np.int32) if self.low_top else np.zeros_like(scales)
        return ScalarBlocks(d, dmin, scales, lows, stored["codes"])

    def write(self, blocks: ScalarBlocks) -> Bytes:
        fields = np.zeros(len(blocks.d), block_dtype(self.type))
        data = _bytes(fields)
        fields["d"] = halves(blocks.d[:, 0])
        if self.low_top:
            fields["dmin"] = halves(blocks.dmin[:, 0])
            self.numbers["lows"].write(data, blocks.lows)
        self.numbers["scales"].write(data, blocks.scales - self.numbers["scales"].lowest)
        self.numbers["codes"].write(data, blocks.codes)
        return data

    def lines(self, blocks: ScalarBlocks) -> tuple[Floats32, Floats32]:
        slopes = blocks.d * blocks.scales.astype(np.float32)
        return slopes, blocks.dmin * blocks.lows.astype(np.float32)

    def neighbours(self, blocks: ScalarBlocks, window: int) -> ScalarBlocks:
        ups, downs = moves(window, window if self.low_top else 0)
        stored = self.numbers["scales"]
        scales = within(blocks.scales + ups, stored.lowest, stored.highest)
        lows = within(blocks.lows + downs, 0, self.low_top) if self.low_top else blocks.lows[None]
        return ScalarBlocks(blocks.d[None], blocks.dmin[None], scales, lows, blocks.codes)


SUPER_BLOCKS = tuple(map(SuperBlocks, (Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_XS)))


@dataclass(frozen=True, eq=False)
class SingleScales(_Layout):
    """A layout with a float16 scale; and

    step    a step, as a share of the scale
    shrink  what the stock encoder's scale is multiplied by to begin with: in ternary types it is the largest
            magnitude, which is far too much for weights that are not ternary themselves
    """

    step: float
    shrink: float = 1.0

    @property
    def codes(self) -> Numbers | Digits:
        return Digits() if self.type == TQ1_0 else self.numbers["codes"]

    @property
    def has_lows(self) -> bool:
        return "m" in (block_dtype(self.type).names or ())

    def read(self, data: Bytes) -> ScalarBlocks:
        n_rows = len(data)
        fields = _fields(self.type, data)
        d = halves_to_float32(fields["d"]).reshape(n_rows, -1)
        dmin = -halves_to_float32(fields["m"]).reshape(n_rows, -1) if self.has_lows else np.zeros_like(d)
        ones = np.ones(d.shape, np.int32)
        return ScalarBlocks(d, dmin, ones, ones, self.codes.read(_bytes(fields)).reshape(n_rows, -1))

    def write(self, blocks: ScalarBlocks) -> Bytes:
        fields = np.zeros(blocks.d.size, block_dtype(self.type))
        fields["d"] = halves(blocks.d).reshape(-1)
        if self.has_lows:
            fields["m"] = halves(-blocks.dmin).reshape(-1)
        self.codes.write(_bytes(fields), blocks.codes.reshape(len(fields), -1))
        return fields.view(np.uint8).reshape(len(blocks.d), -1)

    def lines(self, blocks: ScalarBlocks) -> tuple[Floats32, Floats32]:
        return blocks.d, blocks.dmin

    def begin(self, stock: ScalarBlocks) -> ScalarBlocks:
        return replace(stock, d=as_half(stock.d * np.float32(self.shrink)))

    def neighbours(self, blocks: ScalarBlocks, window: int) -> ScalarBlocks:
        step = np.float32(self.step)
        n_steps = min(2 * window, 3)
        ups, downs = moves(n_steps, n_steps) if self.has_lows else moves(5 * window, 0)
        d = as_half(blocks.d * (1 + step * ups.astype(np.float32)))
        dmin = blocks.dmin[None]
        if self.has_lows:
            dmin = as_half(dmin + blocks.d * step * downs.astype(np.float32))
        return ScalarBlocks(d, dmin, blocks.scales[None], blocks.lows[None], blocks.codes)


_DIGITS = ((0, 32, 5), (32, 48, 5), (48, 52, 4))
"""Bytes of TQ1_0's codes, and how many each holds: the first and last byte of a field, and its digits."""


class Digits:
    """The codes of TQ1_0, at the beginning of a block: as `Numbers`, but with digits in the place of bits."""

    def read(self, blocks: Bytes) -> Codes:
        parts = []
        for start, stop, digits in _DIGITS:
            rest = blocks[:, start:stop].astype(np.int32)
            for _ in range(digits):
                parts.append((rest * 3 >> 8).astype(np.uint8))
                rest = rest * 3 & 0xFF
        return np.concatenate(parts, axis=1)

    def write(self, blocks: Bytes, codes: Codes) -> None:
        first = 0
        for start, stop, digits in _DIGITS:
            size = stop - start
            number = np.zeros((len(codes), size), np.int32)
            for n in range(5):
                number *= 3
                if n < digits:
                    number += codes[:, first + n * size : first + (n + 1) * size]
            blocks[:, start:stop] = -(number * -256 // 243)
            first += digits * size


SINGLE_SCALES = (
    SingleScales(Q4_0, 0.02),
    SingleScales(Q4_1, 0.04),
    SingleScales(Q5_0, 0.01),
    SingleScales(Q5_1, 0.02),
    SingleScales(Q8_0, 0.003),
    SingleScales(IQ4_NL, 0.02),
    SingleScales(TQ1_0, 0.1, 0.5),
    SingleScales(TQ2_0, 0.1, 0.5),
)


_STORED = np.array([*range(15, 8, -1), *range(8)], np.uint8)
"""The stored code of each level."""

_LEVEL_OF = np.array([7 + code if code < 8 else 15 - code for code in range(16)], np.uint8)
"""The number of the level of each stored code; 8, a zero with a sign, is the level 0 too."""


@dataclass(frozen=True, eq=False)
class SmallFloats(_Layout):
    """A layout of 4-bit floats; and

    slopes  turns the bytes of scales into slopes
    bottom  the smallest of these bytes that is tried: 1 / slope is infinite for the first slope of MXFP4
    top     the largest of them
    """

    slopes: Callable[[Integers], Floats32]
    bottom: int
    top: int

    def read(self, data: Bytes) -> ScalarBlocks:
        n_rows = len(data)
        blocks = np.ascontiguousarray(data).reshape(-1, self.type.block_bytes)
        scales = self.numbers["scales"].read(blocks).astype(np.int32).reshape(n_rows, -1)
        ones = np.ones((n_rows, 1), np.float32)
        levels = _LEVEL_OF[self.numbers["codes"].read(blocks)].reshape(n_rows, -1)
        return ScalarBlocks(ones, np.zeros_like(ones), scales, np.zeros_like(scales), levels)

    def write(self, blocks: ScalarBlocks) -> Bytes:
        n_blocks = blocks.codes.size // self.type.block_elems
        data = np.zeros((n_blocks, self.type.block_bytes), np.uint8)
        self.numbers["scales"].write(data, blocks.scales.reshape(n_blocks, -1))
        self.numbers["codes"].write(data, _STORED[blocks.codes].reshape(n_blocks, -1))
        return data.reshape(len(blocks.scales), -1)

    def lines(self, blocks: ScalarBlocks) -> tuple[Floats32, Floats32]:
        slopes = self.slopes(blocks.scales)
        return slopes, np.zeros_like(slopes)

    def neighbours(self, blocks: ScalarBlocks, window: int) -> ScalarBlocks:
        scales = within(blocks.scales + moves(window, 0)[0], self.bottom, self.top)
        return ScalarBlocks(blocks.d[None], blocks.dmin[None], scales, blocks.lows[None], blocks.codes)


SMALL_FLOATS = (
    SmallFloats(MXFP4, lambda exponents: np.ldexp(np.float32(1), exponents - 128), 1, 255),
    SmallFloats(NVFP4, half_scales, 0, LARGEST_BYTE),
)

LAYOUTS: tuple[ScalarLayout, ...] = (*SUPER_BLOCKS, *SINGLE_SCALES, *SMALL_FLOATS)

SCALAR_ROUNDERS: Sequence[Rounder] = tuple(map(ScalarRounder, LAYOUTS))
