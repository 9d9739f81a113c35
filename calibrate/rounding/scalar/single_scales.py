"""Layouts with one float16 scale a block, and perhaps one float16 minimum: blocks of 32, and ternary types.

A scale has no integer to count steps in. A step is a share of the scale, and of a minimum the same share of
the distance between two levels; small ones, so a window is several of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from calibrate.rounding.base import Rounder
from calibrate.rounding.scalar.blocks import Blocks, Codes, Fields, Integers, as_half, halves, integers, moves
from calibrate.rounding.scalar.rounder import ScalarRounder
from gguf_tools.format.ggml_types import IQ4_NL, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, TQ1_0, TQ2_0, GGMLType
from quantize.formats.base import Bytes, Floats32
from quantize.formats.blocks_of_32 import q4_0, q4_1, q5_0, q5_1, q8_0
from quantize.formats.few_bits import tq1_0, tq2_0
from quantize.formats.iq import iq4, iq4_nl
from quantize.simd.floats import halves_to_float32
from quantize.simd.packing import packed, unpack


@dataclass(frozen=True, eq=False)
class SingleScales:
    """A layout (scalar.blocks.Layout) with a float16 scale; and

    block        the dtype of a block
    read_codes   takes the codes out of blocks
    write_codes  puts them there
    step         a step, as a share of the scale
    shrink       what the stock encoder's scale is multiplied by to begin with: in ternary types it is the
                 largest magnitude, which is far too much for weights that are not ternary themselves
    """

    type: GGMLType
    levels: Floats32
    block: np.dtype[Any]
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
        return "m" in (self.block.names or ())

    def read(self, data: Bytes) -> Blocks:
        n_rows = len(data)
        fields = np.ascontiguousarray(data).reshape(-1).view(self.block)
        d = halves_to_float32(fields["d"]).reshape(n_rows, -1)
        dmin = -halves_to_float32(fields["m"]).reshape(n_rows, -1) if self.has_lows else np.zeros_like(d)
        ones = np.ones(d.shape, np.int32)
        return Blocks(d, dmin, ones, ones, self.read_codes(fields).reshape(n_rows, -1))

    def write(self, blocks: Blocks) -> Bytes:
        fields = np.zeros(blocks.d.size, self.block)
        fields["d"] = halves(blocks.d).reshape(-1)
        if self.has_lows:
            fields["m"] = halves(-blocks.dmin).reshape(-1)
        self.write_codes(fields, blocks.codes.reshape(len(fields), -1))
        return fields.view(np.uint8).reshape(len(blocks.d), -1)

    def lines(self, blocks: Blocks) -> tuple[Floats32, Floats32]:
        return blocks.d, blocks.dmin

    def begin(self, stock: Blocks) -> Blocks:
        return replace(stock, d=as_half(stock.d * np.float32(self.shrink)))

    def neighbours(self, blocks: Blocks, window: int) -> Blocks:
        step = np.float32(self.step)
        ups, downs = moves(*(min(2 * window, 3),) * 2) if self.has_lows else moves(5 * window, 0)
        d = as_half(blocks.d * (1 + step * ups.astype(np.float32)))
        dmin = blocks.dmin[None]
        if self.has_lows:
            dmin = as_half(dmin + blocks.d * step * downs.astype(np.float32))
        return Blocks(d, dmin, blocks.scales[None], blocks.lows[None], blocks.codes)


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


LAYOUTS = (
    SingleScales(Q4_0, integers(-8, 7), q4_0.BLOCK, _read_4_bits, _write_4_bits, 0.02),
    SingleScales(Q4_1, integers(0, 15), q4_1.BLOCK, _read_4_bits, _write_4_bits, 0.04),
    SingleScales(Q5_0, integers(-16, 15), q5_0.BLOCK, _read_5_bits, _write_5_bits, 0.01),
    SingleScales(Q5_1, integers(0, 31), q5_1.BLOCK, _read_5_bits, _write_5_bits, 0.02),
    SingleScales(Q8_0, integers(-128, 127), q8_0.BLOCK, _read_q8_0, _write_q8_0, 0.003),
    SingleScales(IQ4_NL, iq4.LEVELS, iq4_nl.BLOCK, _read_4_bits, _write_4_bits, 0.02),
    SingleScales(TQ1_0, integers(-1, 1), tq1_0.BLOCK, _read_tq1_0, _write_tq1_0, 0.1, 0.5),
    SingleScales(TQ2_0, integers(-1, 1), tq2_0.BLOCK, _read_tq2_0, _write_tq2_0, 0.1, 0.5),
)

ROUNDERS: Mapping[str, Rounder] = {layout.type.name: ScalarRounder(layout) for layout in LAYOUTS}
