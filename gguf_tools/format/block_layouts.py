"""The fields of blocks: what a type's bytes are, one row per type.

From here come the dtypes that the codecs read blocks by (quantize/formats/base.py: block_dtype), where the
floating-point numbers are that must be finite (`SCALES`), and which numbers a byte order turns around
(`swap_bytes`). What the bits inside a field mean is told by the module of the type's codec.

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
from typing import TYPE_CHECKING

from gguf_tools.errors import FormatError
from gguf_tools.format.ggml_types import GGMLType, by_name
from gguf_tools.format.header import Endian

if TYPE_CHECKING:
    import numpy as np

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


# Types whose blocks ggml reads through these fields and single bytes. The others (Q3_K, most IQ types) are
# read through casts, and no big-endian file exists that would settle their order.
_SWAPPED = frozenset(
    {
        "F32", "F16", "BF16", "F64", "I8", "I16", "I32", "I64", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0",
        "Q2_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "TQ1_0", "TQ2_0", "MXFP4", "NVFP4", "Q1_0", "Q2_0",
    }
)  # fmt: skip


def can_swap(type_: GGMLType) -> bool:
    """Whether `swap_bytes` knows this type."""
    return type_.name in _SWAPPED


def swap_bytes(type_: GGMLType, data: np.ndarray) -> np.ndarray:
    """Turn the byte order of blocks around.

    A big-endian GGUF file is meant for big-endian machines: the numbers of its header are big-endian, and so
    is every number inside its blocks that the machine reads as a whole: 16-bit scales, and the 32 high bits
    of Q5_0 and Q5_1. Bytes and nibbles stay where they are. `FileLayout` writes the header in the order asked
    for; the code that fills the data passes them through here.

    data     uint8, any shape, C-contiguous: whole blocks of `type_`
    returns  uint8, the same shape, a new array
    raises   FormatError if the type's order on big-endian machines isn't known
    """
    if not can_swap(type_):
        raise FormatError(f"{type_.name} has no known big-endian form; use F32, F16, BF16 or Q8_0")
    swapped = data.copy()
    blocks, swapped_blocks = (array.reshape(-1, type_.block_bytes) for array in (data, swapped))
    for field in (field for field in LAYOUTS[type_.name].block if field.item_bytes > 1):
        for start in range(field.offset, field.offset + field.count * field.item_bytes, field.item_bytes):
            number = slice(start, start + field.item_bytes)
            swapped_blocks[:, number] = blocks[:, number][:, ::-1]
    return swapped


EXPONENTS: Mapping[str, tuple[tuple[int, int], tuple[int, int]]] = {
    "f2": ((1, 0x7C), (1, 0)),
    "b2": ((1, 0x7F), (0, 0x80)),
    "f4": ((3, 0x7F), (2, 0x80)),
    "f8": ((7, 0x7F), (6, 0xF0)),
    "e1": ((0, 0xFF), (0, 0)),
    "m8": ((7, 0x70), (5, 0xC0)),
}
"""(byte, mask) of the two parts of a little-endian number's exponent, by kind of field. Where all these bits
are 1, it is NaN or infinite."""


@dataclass(frozen=True)
class Scales:
    """Where a type keeps its floating-point numbers.

    One NaN or infinite scale turns a whole block, and soon all of a model's output, into NaN. Codes inside a
    block can't do that, so these numbers are all that a check needs to read.

    row     kind of the number before each row, or ""
    block   (kind, offset) of each number in a block
    """

    row: str = ""
    block: tuple[tuple[str, int], ...] = ()


def _scales_of(layout: BlockLayout) -> Scales:
    row = "".join(field.kind for field in layout.row if field.kind in EXPONENTS)
    return Scales(row, tuple((f.kind, f.offset) for f in layout.block if f.kind in EXPONENTS))


_ALL: Mapping[str, Scales] = {name: _scales_of(layout) for name, layout in LAYOUTS.items()}

SCALES: Mapping[str, Scales] = {name: scales for name, scales in _ALL.items() if scales != Scales()}
"""By name of the type; one without such numbers is not in it."""


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
        bad += _nonfinite(table[:, : group * int(scales.row[1:])], scales.row, endian)
    blocks = table[:, meta_bytes:].reshape(len(table), -1, group * type_.block_bytes)
    for kind, offset in scales.block:
        start = group * offset
        bad += _nonfinite(blocks[:, :, start : start + group * int(kind[1:])], kind, endian)
    first = int(np.argmax(bad != 0)) if bad.any() else -1
    return int(bad.sum()), first * group if first >= 0 else -1


def _nonfinite(numbers: np.ndarray, kind: str, endian: Endian) -> np.ndarray:
    """Count, for each row of `numbers`, uint8 (n_rows, ..., n_bytes), those that are NaN or infinite."""
    size = int(kind[1:])
    numbers = numbers.reshape(len(numbers), -1, size)
    swapped_bytes = 2 if kind == "m8" else size  # IQ1_M's is read as four integers
    turned = swapped_bytes - 1 if endian == "big" else 0
    (high, high_mask), (low, low_mask) = EXPONENTS[kind]
    bad = numbers[..., high ^ turned] & high_mask == high_mask
    bad &= numbers[..., low ^ turned] & low_mask == low_mask
    return bad.sum(axis=1)
