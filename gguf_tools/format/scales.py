"""The floating-point numbers inside tensor data, and how many of them are not finite.

One NaN or infinite scale turns a whole block, and soon all of a model's output, into NaN. Codes inside a
block can't do that, so these numbers are all that a check needs to read.

`SCALES` says where they are, for the types that files hold (not NVFP4: to ggml none of its codes is NaN;
not I2_S, whose one scale follows the last row). Offsets are within one block; a group of interleaved rows
keeps the numbers of its rows side by side, before the row group or in the block group. Sources:
ggml-common.h of llama.cpp and of ik_llama.cpp, and ik_llama.cpp's dequantizers for the row metadata.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gguf_tools.format.ggml_types import GGMLType
from gguf_tools.format.header import Endian

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True)
class Scales:
    """Where a type keeps its floating-point numbers.

    row     code of the number before each row, or "": "e" float16, "f" float32
    block   (code, offset) of each number in a block; "e", "f", "d" (float64), "b" bfloat16,
            "x" an 8-bit exponent (255 is NaN), "m" IQ1_M's float16 in the top nibbles of four uint16
    """

    row: str = ""
    block: tuple[tuple[str, int], ...] = ()


_SIZES: Mapping[str, int] = {"e": 2, "b": 2, "f": 4, "d": 8, "x": 1, "m": 8}

_INTEGERS: Mapping[str, int] = {**_SIZES, "m": 2}
"""Bytes of the integers that a byte order turns around."""

EXPONENTS: Mapping[str, tuple[tuple[int, int], tuple[int, int]]] = {
    "e": ((1, 0x7C), (1, 0)),
    "b": ((1, 0x7F), (0, 0x80)),
    "f": ((3, 0x7F), (2, 0x80)),
    "d": ((7, 0x7F), (6, 0xF0)),
    "x": ((0, 0xFF), (0, 0)),
    "m": ((7, 0x70), (5, 0xC0)),
}
"""(byte, mask) of the two parts of a little-endian number's exponent, by code. Where all these bits are 1, it
is NaN or infinite."""


def _halves(*offsets: int) -> Scales:
    return Scales(block=tuple(("e", offset) for offset in offsets))


_FRONT = _halves(0)
_FRONT_TWO = _halves(0, 2)

SCALES: Mapping[str, Scales] = {
    "F32": Scales(block=(("f", 0),)),
    "F16": _FRONT,
    "BF16": Scales(block=(("b", 0),)),
    "BF16_R16": Scales(block=(("b", 0),)),
    "F64": Scales(block=(("d", 0),)),
    "Q4_0": _FRONT,
    "Q4_1": _FRONT_TWO,
    "Q5_0": _FRONT,
    "Q5_1": _FRONT_TWO,
    "Q8_0": _FRONT,
    "Q8_1": _FRONT_TWO,
    "Q2_K": _halves(80, 82),
    "Q3_K": _halves(108),
    "Q4_K": _FRONT_TWO,
    "Q5_K": _FRONT_TWO,
    "Q6_K": _halves(208),
    "Q8_K": Scales(block=(("f", 0),)),
    "IQ2_XXS": _FRONT,
    "IQ2_XS": _FRONT,
    "IQ3_XXS": _FRONT,
    "IQ1_S": _FRONT,
    "IQ4_NL": _FRONT,
    "IQ3_S": _FRONT,
    "IQ2_S": _FRONT,
    "IQ4_XS": _FRONT,
    "IQ1_M": Scales(block=(("m", 48),)),
    "TQ1_0": _halves(52),
    "TQ2_0": _halves(64),
    "MXFP4": Scales(block=(("x", 0),)),
    "Q1_0": _FRONT,
    "Q2_0": _FRONT,
    "Q4_0_4_4": _FRONT,
    "Q4_0_4_8": _FRONT,
    "Q4_0_8_8": _FRONT,
    "Q6_0": _FRONT,
    "IQ1_BN": Scales(row="e"),
    "IQ2_BN": Scales(row="f"),
    "IQ2_TN": Scales(row="f"),
    "IQ1_TN": Scales(row="e"),
    "IQ2_K": _FRONT,
    "IQ3_K": _FRONT,
    "IQ4_K": _FRONT,
    "IQ5_K": _FRONT,
    "IQ6_K": _FRONT,
    "IQ2_KS": Scales(row="e"),
    "IQ3_KS": Scales(row="e"),
    "IQ2_KL": Scales(row="e"),
    "IQ4_KS": Scales(row="f"),
    "IQ4_KSS": Scales(row="f"),
    "IQ5_KS": Scales(row="f"),
    "IQ1_KT": Scales(row="f"),
    "IQ2_KT": Scales(row="f"),
    "IQ3_KT": Scales(row="f"),
    "IQ4_KT": Scales(row="f"),
    "Q8_KV": Scales(row="f"),
    "Q4_0_R8": _FRONT,
    "Q5_0_R4": _FRONT,
    "Q6_0_R4": _FRONT,
    "Q8_0_R8": _FRONT,
    "Q2_K_R4": _FRONT_TWO,
    "Q3_K_R4": _FRONT,
    "Q4_K_R4": _FRONT_TWO,
    "Q5_K_R4": _FRONT_TWO,
    "Q6_K_R4": _FRONT,
    "IQ2_XXS_R4": _FRONT,
    "IQ2_XS_R4": _FRONT,
    "IQ2_S_R4": _FRONT,
    "IQ3_XXS_R4": _FRONT,
    "IQ3_S_R4": _FRONT,
    "IQ4_NL_R4": _FRONT,
    "IQ4_XS_R8": _FRONT,
    "IQ1_S_R4": Scales(row="e"),
    "IQ1_M_R4": Scales(row="e"),
    "IQ2_BN_R4": Scales(row="f"),
    "IQ2_K_R4": _FRONT,
    "IQ3_K_R4": _FRONT,
    "IQ4_K_R4": _FRONT,
    "IQ5_K_R4": _FRONT,
    "IQ4_KS_R4": Scales(row="f"),
    "IQ5_KS_R4": Scales(row="f"),
    "MXFP4_R8": Scales(block=(("x", 0),)),
    "Q8_KV_R8": Scales(row="f"),
    "Q8_K_R8": _FRONT,
    "Q8_K_R16": _FRONT,
}


def count_nonfinite(
    type_: GGMLType, rows: np.ndarray, row_bytes: int, endian: Endian = "little"
) -> tuple[int, int]:
    """Count the numbers in `rows` that are NaN or infinite.

    rows     uint8 (n_rows * row_bytes,): whole rows, whole groups of them if the type interleaves rows
    returns  how many, and the row of the first one (for interleaved rows, the first row of its group), -1 if
             there is none
    """
    import numpy as np

    group = type_.rows_interleaved
    scales = SCALES.get(type_.name)
    if scales is None:
        return 0, -1
    table = rows.reshape(-1, group * row_bytes)
    meta_bytes = group * type_.row_meta_bytes
    bad = np.zeros(len(table), np.int64)
    if scales.row:
        bad += _nonfinite(table[:, : group * _SIZES[scales.row]], scales.row, endian)
    blocks = table[:, meta_bytes:].reshape(len(table), -1, group * type_.block_bytes)
    for code, offset in scales.block:
        start = group * offset
        bad += _nonfinite(blocks[:, :, start : start + group * _SIZES[code]], code, endian)
    first = int(np.argmax(bad != 0)) if bad.any() else -1
    return int(bad.sum()), first * group if first >= 0 else -1


def _nonfinite(numbers: np.ndarray, code: str, endian: Endian) -> np.ndarray:
    """Count, for each row of `numbers`, uint8 (n_rows, ..., n_bytes), those that are NaN or infinite."""
    numbers = numbers.reshape(len(numbers), -1, _SIZES[code])
    turned = _INTEGERS[code] - 1 if endian == "big" else 0
    (high, high_mask), (low, low_mask) = EXPONENTS[code]
    bad = numbers[..., high ^ turned] & high_mask == high_mask
    bad &= numbers[..., low ^ turned] & low_mask == low_mask
    return bad.sum(axis=1)
