"""The fields of blocks: what a type's bytes are, one row per type.

From here come the dtypes that the codecs read blocks by (quantize/formats/base.py: block_dtype), where the
floating-point numbers are that must be finite (scales.py), and which numbers a byte order turns around
(endian.py). What the bits inside a field mean is told by the module of the type's codec.

A row has the fields of a block in order: kind, name, and how many there are. Fields before a semicolon stand
before a row's blocks. "..." is the rest of a block, which only its codec reads, if there is one.

    u1 u2 u4      integers, little-endian; several bits fields of one byte are one of these
    i1 i2 i4 i8   integers with a sign
    f2 f4 f8 b2   float16, float32, float64, bfloat16
    e1            an exponent of 8 bits: 2**(e - 127), and 255 is NaN
    m8            IQ1_M's float16, in the upper 4 bits of four u2, which have scales in the others

Of a type that interleaves rows this is one row's share of a group. What has byte i there begins at byte
i * rows of the group, row after row.

NVFP4's scales are no floats here, as none of their codes is NaN to ggml. I2_S, whose one scale follows the
last row, is left out. Sources: ggml-common.h of llama.cpp and of ik_llama.cpp, and for what stands before a
row ik_llama.cpp's dequantizers (versions in ggml_types.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gguf_tools.format.ggml_types import by_name

_FRONT, _FRONT_TWO, _ROW_HALF, _ROW_SINGLE = "f2 d, ...", "f2 d, f2 dmin, ...", "f2 d; ...", "f4 d; ..."

_ROWS: Mapping[str, str] = {
    "F32": "f4 x",
    "F16": "f2 x",
    "BF16": "b2 x",
    "BF16_R16": "b2 x",
    "F64": "f8 x",
    "I8": "i1 x",
    "I16": "i2 x",
    "I32": "i4 x",
    "I64": "i8 x",
    "Q4_0": "f2 d, u1 qs 16",
    "Q4_1": "f2 d, f2 m, u1 qs 16",
    "Q5_0": "f2 d, u4 qh, u1 qs 16",
    "Q5_1": "f2 d, f2 m, u4 qh, u1 qs 16",
    "Q8_0": "f2 d, i1 qs 32",
    "Q8_1": "f2 d, f2 s, i1 qs 32",
    "Q2_K": "u1 scales 16, u1 qs 64, f2 d, f2 dmin",
    "Q3_K": "u1 hmask 32, u1 qs 64, u1 scales 12, f2 d",
    "Q4_K": "f2 d, f2 dmin, u1 scales 12, u1 qs 128",
    "Q5_K": "f2 d, f2 dmin, u1 scales 12, u1 qh 32, u1 qs 128",
    "Q6_K": "u1 ql 128, u1 qh 64, i1 scales 16, f2 d",
    "Q8_K": "f4 d, i1 qs 256, i2 bsums 16",
    "IQ2_XXS": "f2 d, u2 qs 32",
    "IQ2_XS": "f2 d, u2 qs 32, u1 scales 8",
    "IQ2_S": "f2 d, u1 qs 32, u1 signs 32, u1 qh 8, u1 scales 8",
    "IQ3_XXS": "f2 d, u1 qs 64, u4 words 8",
    "IQ3_S": "f2 d, u1 qs 64, u1 qh 8, u1 signs 32, u1 scales 4",
    "IQ1_S": "f2 d, u1 qs 32, u2 qh 8",
    "IQ1_M": "u1 qs 32, u1 qh 16, m8 scales",
    "IQ4_NL": "f2 d, u1 qs 16",
    "IQ4_XS": "f2 d, u2 scales_h, u1 scales_l 4, u1 qs 128",
    "TQ1_0": "u1 qs 48, u1 qh 4, f2 d",
    "TQ2_0": "u1 qs 64, f2 d",
    "MXFP4": "e1 e, u1 qs 16",
    "NVFP4": "u1 d 4, u1 qs 32",
    "Q1_0": "f2 d, u1 qs 16",
    "Q2_0": "f2 d, u1 qs 16",
    "Q4_0_4_4": _FRONT,
    "Q4_0_4_8": _FRONT,
    "Q4_0_8_8": _FRONT,
    "Q6_0": "f2 d, u1 qh 8, u1 qs 16",
    "IQ1_BN": _ROW_HALF,
    "IQ2_BN": _ROW_SINGLE,
    "IQ2_TN": _ROW_SINGLE,
    "IQ1_TN": _ROW_HALF,
    "IQ2_K": "f2 d, u2 extra, u1 scales 8, u1 qs 64",
    "IQ3_K": "f2 d, u2 extra, u2 scales_h, u1 scales_l 8, u1 qs 64, u1 qh 32",
    "IQ4_K": "f2 d, u2 extra, u1 scales_h 4, u1 scales_l 8, u1 qs 128",
    "IQ5_K": "f2 d, u2 extra, u1 scales_h 4, u1 scales_l 8, u1 qs 128, u1 qh 32",
    "IQ6_K": "f2 d, u2 extra, i1 scales 16, u1 qs 128, u1 qh 64",
    "IQ2_KS": "f2 d; u2 extra, u1 scales 4, u1 qs 64",
    "IQ3_KS": "f2 d; u2 extra, u1 scales 4, u1 qs 64, u1 qh 32",
    "IQ2_KL": "f2 d; u2 scales_h, u1 scales_l 4, u1 qs 64, u1 qh 16",
    "IQ4_KS": "f4 d; u1 scales 8, u1 qs 128",
    "IQ4_KSS": "f4 d; u2 qs 64",
    "IQ5_KS": "f4 d; u1 scales 8, u1 qs 128, u1 qh 32",
    "IQ1_KT": "f4 d; u1 sh 8, u1 ql 32, u1 qh 16",
    "IQ2_KT": "f4 d; u1 scales 4, u2 ql 32",
    "IQ3_KT": "f4 d; u1 scales 4, u2 ql 32, u1 qh 32",
    "IQ4_KT": "f4 d; u4 shb 8, u1 ql 64, u1 qh 32",
    "Q8_KV": "f4 d, i4 sum; i1 qs 32",
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
    "IQ1_S_R4": _ROW_HALF,
    "IQ1_M_R4": _ROW_HALF,
    "IQ2_BN_R4": _ROW_SINGLE,
    "IQ2_K_R4": _FRONT,
    "IQ3_K_R4": _FRONT,
    "IQ4_K_R4": _FRONT,
    "IQ5_K_R4": _FRONT,
    "IQ4_KS_R4": _ROW_SINGLE,
    "IQ5_KS_R4": _ROW_SINGLE,
    "MXFP4_R8": "e1 e, ...",
    "Q8_KV_R8": _ROW_SINGLE,
    "Q8_K_R8": _FRONT,
    "Q8_K_R16": _FRONT,
}


@dataclass(frozen=True)
class Field:
    """Numbers that stand side by side.

    kind    as in the rows
    offset  of the first one, in a block or in what stands before a row
    """

    kind: str
    name: str
    count: int
    offset: int

    @property
    def item_bytes(self) -> int:
        return int(self.kind[1:])


@dataclass(frozen=True)
class BlockLayout:
    """The fields of a type: `row` before each row's blocks, `block` in each block, gaps left out."""

    row: tuple[Field, ...]
    block: tuple[Field, ...]


def _layout(name: str, text: str) -> BlockLayout:
    row, _, block = text.rpartition(";")
    type_ = by_name(name)
    return BlockLayout(_fields(row, type_.row_meta_bytes), _fields(block, type_.block_bytes))


def _fields(text: str, n_bytes: int) -> tuple[Field, ...]:
    """Return the fields of a text, which take `n_bytes` or end in "..."."""
    fields, offset = [], 0
    words = [part.split() for part in text.split(",") if part.strip()]
    for kind, name, *count in (part for part in words if part != ["..."]):
        field = Field(kind, name, int(count[0]) if count else 1, offset)
        fields.append(field)
        offset += field.count * field.item_bytes
    if offset > n_bytes or (offset < n_bytes and ["..."] not in words):
        raise ValueError(f"fields of {offset} bytes, expected {n_bytes}: {text}")
    return tuple(fields)


LAYOUTS: Mapping[str, BlockLayout] = {name: _layout(name, text) for name, text in _ROWS.items()}
"""By name of the type."""
