"""Every tensor type id that llama.cpp or ik_llama.cpp ever gave a meaning, with its sizes and its block.

A tensor's data is its rows one after the other. A row is `row_meta_bytes` (per-row scales, only
in ik_llama.cpp's types), then one block of `block_bytes` for every `block_elems` elements. Types
with `rows_interleaved` > 1 interleave that many rows for SIMD; a group takes as many bytes as its rows would
take on their own.

A row has the fields of a block in order: kind, name, and how many there are. Fields before a semicolon stand
before a row's blocks. "..." is the rest of a block, which only its codec reads, if there is one. What the
bits inside a field mean is told by the module of the type's codec, and where numbers have theirs by `BITS`.

    u1 u2 u4 u8   integers, little-endian; several bits fields of one byte are one of these
    i1 i2 i4 i8   integers with a sign
    f2 f4 f8 b2   float16, float32, float64, bfloat16
    e1            an exponent of 8 bits: 2**(e - 127), and 255 is NaN
    m8            IQ1_M's float16, in the upper 4 bits of four u2, which have scales in the others

Of a type that interleaves rows the fields are one row's share of a group. What has byte i there begins at
byte i * rows of the group, row after row. NVFP4's scales are no floats here, as none of their codes is NaN to
ggml. I2_S, whose one scale follows the last row, has no fields.

Sources: `enum ggml_type` in ggml.h, `type_traits` in ggml.c and the structs of ggml-common.h, as of
llama.cpp 0c1e570 (2026-10-01) and ik_llama.cpp 8337e4c (2026-08-15), whose dequantizers say what stands
before a row. Ids up to 42 belong to llama.cpp; from 97 on to ik_llama.cpp, which chose high numbers to stay
out of the way. `note` says what is special about an id. Where the two projects disagree:

  15  Q8_K    292 bytes in llama.cpp, 296 in ik_llama.cpp (one more float); never in a file
  36          IQ4_NL_4_4 in llama.cpp, removed before any file could hold it; I2_S in ik_llama.cpp
  41          Q1_0 in llama.cpp, Q1_0_G128 in ik_llama.cpp: the same block

Ids 4 and 5 (Q4_2, Q4_3) were removed before GGUF existed; they have the sizes they had then.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod

from gguf_tools.errors import FormatError, ShapeError

_BY_NAME: dict[str, GGMLType] = {}


class _ByName(type):
    """Gives a class of types each of them by its name: GGMLType.Q4_K, GGMLType["q4_k"]."""

    def __getattr__(cls, name: str) -> GGMLType:
        if name in _BY_NAME:
            return _BY_NAME[name]
        raise AttributeError(f"{cls.__name__} has no {name!r}", name=name, obj=cls)

    def __getitem__(cls, name: str) -> GGMLType:
        return by_name(name)

    def __dir__(cls) -> list[str]:
        return sorted({*super().__dir__(), *_BY_NAME})


@dataclass(frozen=True)
class GGMLType(metaclass=_ByName):
    """A tensor type as a fact of the file format; each is an attribute of the class.

    >>> GGMLType.Q4_K.bits_per_weight, GGMLType["q4_k"] is GGMLType.Q4_K
    (4.5, True)

    id                what the file stores
    name              as in ggml's enum, without the prefix
    block_elems       elements that share a block
    block_bytes       bytes of one block
    fields            of a block, in the notation above, or ""
    row_meta_bytes    bytes before each row's blocks
    rows_interleaved  rows that are stored as one group
    tensor_meta_bytes  bytes after the last row
    note              what a user should know, or ""
    """

    id: int
    name: str
    block_elems: int
    block_bytes: int
    fields: str = field(default="", repr=False, compare=False)
    row_meta_bytes: int = 0
    rows_interleaved: int = 1
    tensor_meta_bytes: int = 0
    note: str = ""

    def __str__(self) -> str:
        return self.name

    @property
    def is_internal(self) -> bool:
        """Whether programs use this type only while computing, and never in files."""
        return self.note.startswith(_INTERNAL)

    @property
    def is_only_in_ik(self) -> bool:
        """Whether ik_llama.cpp alone knows this type."""
        return self.id >= _FIRST_OF_IK or self.name == "I2_S"

    @property
    def is_quantized(self) -> bool:
        return self.block_elems > 1

    @property
    def bits_per_weight(self) -> float:
        """Bits per element, not counting what a row or a tensor stores once."""
        return 8 * self.block_bytes / self.block_elems

    def row_bytes(self, n_cols: int) -> int:
        """Bytes of one row; raises ShapeError if `n_cols` is not a multiple of `block_elems`."""
        if n_cols % self.block_elems:
            raise ShapeError(f"row length {n_cols} is not a multiple of {self.block_elems} ({self.name})")
        return self.row_meta_bytes + n_cols // self.block_elems * self.block_bytes

    def tensor_bytes(self, shape: tuple[int, ...]) -> int:
        """Bytes of a tensor of `shape` (rows first; `()` is one element); raises ShapeError."""
        n_cols = shape[-1] if shape else 1
        return prod(shape[:-1]) * self.row_bytes(n_cols) + self.tensor_meta_bytes


_REMOVED = "removed from llama.cpp"
_REPACKED = "removed from llama.cpp, which repacks while loading"
_INTERNAL = "used while computing, not in files"
_FIRST_OF_IK = 97
_FRONT, _FRONT_TWO, _ROW_HALF, _ROW_SINGLE = "f2 d, ...", "f2 d, f2 dmin, ...", "f2 d; ...", "f4 d; ..."

F32 = GGMLType(0, "F32", 1, 4, "f4 x")
F16 = GGMLType(1, "F16", 1, 2, "f2 x")
Q4_0 = GGMLType(2, "Q4_0", 32, 18, "f2 d, u1 qs 16")
Q4_1 = GGMLType(3, "Q4_1", 32, 20, "f2 d, f2 m, u1 qs 16")
Q4_2 = GGMLType(4, "Q4_2", 16, 10, note=_REMOVED)
Q4_3 = GGMLType(5, "Q4_3", 16, 12, note=_REMOVED)
Q5_0 = GGMLType(6, "Q5_0", 32, 22, "f2 d, u4 qh, u1 qs 16")
Q5_1 = GGMLType(7, "Q5_1", 32, 24, "f2 d, f2 m, u4 qh, u1 qs 16")
Q8_0 = GGMLType(8, "Q8_0", 32, 34, "f2 d, i1 qs 32")
Q8_1 = GGMLType(9, "Q8_1", 32, 36, "f2 d, f2 s, i1 qs 32", note=_INTERNAL)
Q2_K = GGMLType(10, "Q2_K", 256, 84, "u1 scales 16, u1 qs 64, f2 d, f2 dmin")
Q3_K = GGMLType(11, "Q3_K", 256, 110, "u1 hmask 32, u1 qs 64, u1 scales 12, f2 d")
Q4_K = GGMLType(12, "Q4_K", 256, 144, "f2 d, f2 dmin, u1 scales 12, u1 qs 128")
Q5_K = GGMLType(13, "Q5_K", 256, 176, "f2 d, f2 dmin, u1 scales 12, u1 qh 32, u1 qs 128")
Q6_K = GGMLType(14, "Q6_K", 256, 210, "u1 ql 128, u1 qh 64, i1 scales 16, f2 d")
Q8_K = GGMLType(
    15, "Q8_K", 256, 292, "f4 d, i1 qs 256, i2 bsums 16", note=_INTERNAL + "; 296 bytes in ik_llama.cpp"
)
IQ2_XXS = GGMLType(16, "IQ2_XXS", 256, 66, "f2 d, u8 qs 8")
IQ2_XS = GGMLType(17, "IQ2_XS", 256, 74, "f2 d, u2 qs 32, u1 scales 8")
IQ3_XXS = GGMLType(18, "IQ3_XXS", 256, 98, "f2 d, u1 qs 64, u4 words 8")
IQ1_S = GGMLType(19, "IQ1_S", 256, 50, "f2 d, u1 qs 32, u2 qh 8")
IQ4_NL = GGMLType(20, "IQ4_NL", 32, 18, "f2 d, u1 qs 16")
IQ3_S = GGMLType(21, "IQ3_S", 256, 110, "f2 d, u1 qs 64, u1 qh 8, u1 signs 32, u1 scales 4")
IQ2_S = GGMLType(22, "IQ2_S", 256, 82, "f2 d, u1 qs 32, u1 signs 32, u1 qh 8, u1 scales 8")
IQ4_XS = GGMLType(23, "IQ4_XS", 256, 136, "f2 d, u2 scales_h, u1 scales_l 4, u1 qs 128")
I8 = GGMLType(24, "I8", 1, 1, "i1 x")
I16 = GGMLType(25, "I16", 1, 2, "i2 x")
I32 = GGMLType(26, "I32", 1, 4, "i4 x")
I64 = GGMLType(27, "I64", 1, 8, "i8 x")
F64 = GGMLType(28, "F64", 1, 8, "f8 x")
IQ1_M = GGMLType(29, "IQ1_M", 256, 56, "u1 qs 32, u1 qh 16, m8 scales")
BF16 = GGMLType(30, "BF16", 1, 2, "b2 x")
Q4_0_4_4 = GGMLType(31, "Q4_0_4_4", 32, 18, _FRONT, rows_interleaved=4, note=_REPACKED)
Q4_0_4_8 = GGMLType(32, "Q4_0_4_8", 32, 18, _FRONT, rows_interleaved=4, note=_REPACKED)
Q4_0_8_8 = GGMLType(33, "Q4_0_8_8", 32, 18, _FRONT, rows_interleaved=8, note=_REPACKED)
TQ1_0 = GGMLType(34, "TQ1_0", 256, 54, "u1 qs 48, u1 qh 4, f2 d")
TQ2_0 = GGMLType(35, "TQ2_0", 256, 66, "u1 qs 64, f2 d")
I2_S = GGMLType(36, "I2_S", 4, 1, tensor_meta_bytes=32, note="BitNet's, in ik_llama.cpp; one scale a tensor")
IQ4_NL_4_8 = GGMLType(37, "IQ4_NL_4_8", 32, 18, rows_interleaved=4, note=_REPACKED)
IQ4_NL_8_8 = GGMLType(38, "IQ4_NL_8_8", 32, 18, rows_interleaved=8, note=_REPACKED)
MXFP4 = GGMLType(39, "MXFP4", 32, 17, "e1 e, u1 qs 16")
NVFP4 = GGMLType(40, "NVFP4", 64, 36, "u1 d 4, u1 qs 32")
Q1_0 = GGMLType(41, "Q1_0", 128, 18, "f2 d, u1 qs 16", note="Q1_0_G128 in ik_llama.cpp")
Q2_0 = GGMLType(42, "Q2_0", 64, 18, "f2 d, u1 qs 16")

Q8_0_X4 = GGMLType(97, "Q8_0_X4", 32, 34, note=_INTERNAL)
Q8_1_X4 = GGMLType(98, "Q8_1_X4", 32, 36, note=_INTERNAL)
Q8_2_X4 = GGMLType(99, "Q8_2_X4", 32, 36, note=_INTERNAL)
Q6_0 = GGMLType(133, "Q6_0", 32, 26, "f2 d, u1 qh 8, u1 qs 16")
IQ1_BN = GGMLType(134, "IQ1_BN", 64, 13, _ROW_HALF, row_meta_bytes=2)
IQ2_BN = GGMLType(135, "IQ2_BN", 64, 16, _ROW_SINGLE, row_meta_bytes=4)
Q8_K64 = GGMLType(136, "Q8_K64", 64, 68, note=_INTERNAL)
IQ2_K = GGMLType(137, "IQ2_K", 256, 76, "f2 d, u2 extra, u1 scales 8, u1 qs 64")
IQ3_K = GGMLType(138, "IQ3_K", 256, 110, "f2 d, u2 extra, u2 scales_h, u1 scales_l 8, u1 qs 64, u1 qh 32")
IQ4_K = GGMLType(139, "IQ4_K", 256, 144, "f2 d, u2 extra, u1 scales_h 4, u1 scales_l 8, u1 qs 128")
IQ5_K = GGMLType(140, "IQ5_K", 256, 176, "f2 d, u2 extra, u1 scales_h 4, u1 scales_l 8, u1 qs 128, u1 qh 32")
IQ6_K = GGMLType(141, "IQ6_K", 256, 212, "f2 d, u2 extra, i1 scales 16, u1 qs 128, u1 qh 64")
IQ2_TN = GGMLType(
    142, "IQ2_TN", 256, 64, _ROW_SINGLE, row_meta_bytes=4, note="removed from ik_llama.cpp, use IQ2_BN"
)
IQ1_TN = GGMLType(
    143, "IQ1_TN", 256, 52, _ROW_HALF, row_meta_bytes=2, note="removed from ik_llama.cpp, use IQ1_BN"
)
IQ4_KS = GGMLType(144, "IQ4_KS", 256, 136, "f4 d; u1 scales 8, u1 qs 128", row_meta_bytes=4)
IQ2_KS = GGMLType(145, "IQ2_KS", 256, 70, "f2 d; u2 extra, u1 scales 4, u1 qs 64", row_meta_bytes=2)
IQ4_KSS = GGMLType(146, "IQ4_KSS", 256, 128, "f4 d; u2 qs 64", row_meta_bytes=4)
Q8_K16 = GGMLType(147, "Q8_K16", 64, 64, row_meta_bytes=20, note=_INTERNAL)
Q8_K32 = GGMLType(148, "Q8_K32", 256, 296, note=_INTERNAL)
Q8_KR8 = GGMLType(149, "Q8_KR8", 256, 296, note=_INTERNAL)
Q8_K128 = GGMLType(150, "Q8_K128", 128, 140, note=_INTERNAL)
Q8_KV = GGMLType(151, "Q8_KV", 32, 32, "f4 d, i4 sum; i1 qs 32", row_meta_bytes=8)
IQ5_KS = GGMLType(152, "IQ5_KS", 256, 168, "f4 d; u1 scales 8, u1 qs 128, u1 qh 32", row_meta_bytes=4)
IQ2_KT = GGMLType(153, "IQ2_KT", 256, 68, "f4 d; u1 scales 4, u2 ql 32", row_meta_bytes=4)
IQ3_KT = GGMLType(154, "IQ3_KT", 256, 100, "f4 d; u1 scales 4, u2 ql 32, u1 qh 32", row_meta_bytes=4)
IQ4_KT = GGMLType(155, "IQ4_KT", 256, 128, "f4 d; u4 shb 8, u1 ql 64, u1 qh 32", row_meta_bytes=4)
IQ3_KS = GGMLType(
    156, "IQ3_KS", 256, 102, "f2 d; u2 extra, u1 scales 4, u1 qs 64, u1 qh 32", row_meta_bytes=2
)
IQ2_KL = GGMLType(
    157, "IQ2_KL", 256, 86, "f2 d; u2 scales_h, u1 scales_l 4, u1 qs 64, u1 qh 16", row_meta_bytes=2
)
IQ1_KT = GGMLType(158, "IQ1_KT", 256, 56, "f4 d; u1 sh 8, u1 ql 32, u1 qh 16", row_meta_bytes=4)

Q4_0_R8 = GGMLType(202, "Q4_0_R8", 32, 18, _FRONT, rows_interleaved=8)
Q5_0_R4 = GGMLType(206, "Q5_0_R4", 32, 22, _FRONT, rows_interleaved=4)
Q8_0_R8 = GGMLType(208, "Q8_0_R8", 32, 34, _FRONT, rows_interleaved=8)
Q2_K_R4 = GGMLType(210, "Q2_K_R4", 256, 84, _FRONT_TWO, rows_interleaved=4)
Q3_K_R4 = GGMLType(211, "Q3_K_R4", 256, 110, _FRONT, rows_interleaved=4)
Q4_K_R4 = GGMLType(212, "Q4_K_R4", 256, 144, _FRONT_TWO, rows_interleaved=4)
Q5_K_R4 = GGMLType(213, "Q5_K_R4", 256, 176, _FRONT_TWO, rows_interleaved=4)
Q6_K_R4 = GGMLType(214, "Q6_K_R4", 256, 210, _FRONT, rows_interleaved=4)
IQ2_XXS_R4 = GGMLType(216, "IQ2_XXS_R4", 256, 66, _FRONT, rows_interleaved=4)
IQ2_XS_R4 = GGMLType(217, "IQ2_XS_R4", 256, 74, _FRONT, rows_interleaved=4)
IQ3_XXS_R4 = GGMLType(218, "IQ3_XXS_R4", 256, 98, _FRONT, rows_interleaved=4)
IQ1_S_R4 = GGMLType(219, "IQ1_S_R4", 32, 6, _ROW_HALF, row_meta_bytes=2, rows_interleaved=4)
IQ4_NL_R4 = GGMLType(220, "IQ4_NL_R4", 32, 18, _FRONT, rows_interleaved=4)
IQ3_S_R4 = GGMLType(221, "IQ3_S_R4", 256, 110, _FRONT, rows_interleaved=4)
IQ2_S_R4 = GGMLType(222, "IQ2_S_R4", 256, 82, _FRONT, rows_interleaved=4)
IQ4_XS_R8 = GGMLType(223, "IQ4_XS_R8", 256, 136, _FRONT, rows_interleaved=8)
IQ1_M_R4 = GGMLType(229, "IQ1_M_R4", 32, 7, _ROW_HALF, row_meta_bytes=2, rows_interleaved=4)
BF16_R16 = GGMLType(230, "BF16_R16", 1, 2, "b2 x", rows_interleaved=16)
Q6_0_R4 = GGMLType(233, "Q6_0_R4", 32, 26, _FRONT, rows_interleaved=4)
IQ2_BN_R4 = GGMLType(335, "IQ2_BN_R4", 64, 16, _ROW_SINGLE, row_meta_bytes=4, rows_interleaved=4)
IQ2_K_R4 = GGMLType(337, "IQ2_K_R4", 256, 76, _FRONT, rows_interleaved=4)
IQ3_K_R4 = GGMLType(338, "IQ3_K_R4", 256, 110, _FRONT, rows_interleaved=4)
IQ4_K_R4 = GGMLType(339, "IQ4_K_R4", 256, 144, _FRONT, rows_interleaved=4)
IQ5_K_R4 = GGMLType(340, "IQ5_K_R4", 256, 176, _FRONT, rows_interleaved=4)
IQ4_KS_R4 = GGMLType(344, "IQ4_KS_R4", 256, 136, _ROW_SINGLE, row_meta_bytes=4, rows_interleaved=4)
IQ5_KS_R4 = GGMLType(352, "IQ5_KS_R4", 256, 168, _ROW_SINGLE, row_meta_bytes=4, rows_interleaved=4)
MXFP4_R8 = GGMLType(353, "MXFP4_R8", 32, 17, "e1 e, ...", rows_interleaved=8)
Q8_K_R16 = GGMLType(397, "Q8_K_R16", 256, 258, _FRONT, rows_interleaved=16)
Q8_KV_R8 = GGMLType(398, "Q8_KV_R8", 32, 32, _ROW_SINGLE, row_meta_bytes=4, rows_interleaved=8)
Q8_K_R8 = GGMLType(399, "Q8_K_R8", 256, 258, _FRONT, rows_interleaved=8)

TYPES: tuple[GGMLType, ...] = tuple(value for value in list(vars().values()) if isinstance(value, GGMLType))

_BY_ID = {type_.id: type_ for type_ in TYPES}
_BY_NAME.update({type_.name: type_ for type_ in TYPES}, Q1_0_G128=Q1_0)


SWAPPED = frozenset(
    {
        "F32", "F16", "BF16", "F64", "I8", "I16", "I32", "I64", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0",
        "Q2_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "TQ1_0", "TQ2_0", "MXFP4", "NVFP4", "Q1_0", "Q2_0",
    }
)  # fmt: skip
"""Types whose blocks ggml reads through these fields and single bytes, by name. The others (Q3_K, most IQ
types) are read through casts, and no big-endian file exists that would settle their order."""

_PAIRS_OF_6_BITS = (
    "scales = scales[0:4] 4, scales[8:12] 4 | scales[0:4] 2x2/4@4;"
    " lows = scales[4:8] 4, scales[8:12] 4@4 | scales[4:8] 2x2/4@4"
)

BITS: Mapping[str, str] = {
    "Q4_0": "codes = qs 4x2/16 - 8",
    "Q4_1": "codes = qs 4x2/16",
    "Q5_0": "codes = qs 4x2/16 | qh 1x32 - 16",
    "Q5_1": "codes = qs 4x2/16 | qh 1x32",
    "Q8_0": "codes = qs 8",
    "Q2_K": "codes = qs 2x4/32; scales = scales 4; lows = scales 4@4",
    "Q3_K": "codes = qs 2x4/32 | hmask 1x8/32 - 4; scales = scales[0:8] 4x2/8 | scales[8:12] 2x4/4 - 32",
    "Q4_K": f"codes = qs 4x2/32; {_PAIRS_OF_6_BITS}",
    "Q5_K": f"codes = qs 4x2/32 | qh 1x8/32; {_PAIRS_OF_6_BITS}",
    "Q6_K": "codes = ql 4x2/64 | qh 2x4/32 - 32; scales = scales 8",
    "IQ1_S": "codes = qs 8 | qh 3x4; signs = qh 1@15; scales = qh 3@12",
    "IQ1_M": "codes = qs 8 | qh 3:4x2; signs = qh 1:4x2@3; scales = scales 3x4; d = scales 4@12",
    "IQ2_XXS": "codes = qs 8x4; signs = qs 7x4@32; scales = qs 4@60",
    "IQ2_XS": "codes = qs 9; signs = qs 7@9; scales = scales 4x2",
    "IQ2_S": "codes = qs 8 | qh 2x4; signs = signs 8; scales = scales 4x2",
    "IQ3_XXS": "codes = qs 8; signs = words 7x4; scales = words 4@28",
    "IQ3_S": "codes = qs 8 | qh 1x8; signs = signs 8; scales = scales 4x2",
    "IQ4_NL": "codes = qs 4x2/16",
    "IQ4_XS": "codes = qs 4x2/16; scales = scales_l 4x2 | scales_h 2x8 - 32",
    "TQ2_0": "codes = qs 2x4/32 - 1",
    "MXFP4": "codes = qs 4x2/16; scales = e 8",
    "NVFP4": "codes = qs 4x2/8; scales = d 8",
    "Q6_0": "codes = qs 4x2/16 | qh 2:4x2/8, qh 2:4x2/8@2 - 32",
    "IQ2_K": "codes = qs 2x4/32; scales = scales 4x2",
    "IQ3_K": "codes = qs 2x4/32 | qh 1x8/32; scales = scales_l 4x2 | scales_h 1x16",
    "IQ4_K": "codes = qs 4x2/16; scales = scales_l 4x2 | scales_h 2x4",
    "IQ5_K": "codes = qs 4x2/32 | qh 1x8/32; scales = scales_l 4x2 | scales_h 2x4",
    "IQ4_KS": "codes = qs 4x2/16",
    "IQ5_KS": "codes = qs 4x2/32 | qh 1x8/32",
}
"""Where numbers have their bits; quantize/formats/bits.py reads it. Of the types that are rounded with
feedback (but TQ1_0, whose codes are digits), and of those whose rows another type interleaves.

A number is told by its lowest bits, then, after "|", by the next ones. A run of bits is a field, or some of
its items, and how the numbers lie there:

    8           each item is a number of 8 bits
    4@4         of each item, 4 bits from bit 4 on
    4x2         two numbers of 4 bits in each item, one after the other
    4x2/16      the same, but 16 items have 16 numbers in their first 4 bits, then the next 16
    3:4x2       two numbers of 3 bits, 4 bits apart

A comma comes before further numbers. "- 32" says that a number is 32 less than what is stored, where rounding
has to know. In fields with a sign numbers have one, and 8 bits."""


def by_id(type_id: int) -> GGMLType:
    """Return the type with this id; raises FormatError for an id that neither project has given a meaning."""
    try:
        return _BY_ID[type_id]
    except KeyError:
        raise FormatError(f"unknown tensor type id {type_id}") from None


def by_name(name: str) -> GGMLType:
    """Return the type of this name, in any case ("q4_k" is Q4_K); raises FormatError."""
    try:
        return _BY_NAME[name.upper()]
    except KeyError:
        raise FormatError(f"unknown tensor type {name!r:.80}") from None
