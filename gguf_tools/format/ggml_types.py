"""Every tensor type id that llama.cpp or ik_llama.cpp ever gave a meaning, with its sizes.

A tensor's data is its rows one after the other. A row is `row_meta_bytes` (per-row scales, only
in ik_llama.cpp's types), then one block of `block_bytes` for every `block_elems` elements. Types
with `rows_interleaved` > 1 interleave that many rows for SIMD; a group takes as many bytes as its rows would
take on their own.

Sources: `enum ggml_type` in ggml.h, `type_traits` in ggml.c and the structs of ggml-common.h, as of
llama.cpp 0c1e570 (2026-10-01) and ik_llama.cpp 8337e4c (2026-08-15). Ids up to 42 belong to
llama.cpp; from 97 on to ik_llama.cpp, which chose high numbers to stay out of the way. `note` says
what is special about an id. Where the two projects disagree:

  15  Q8_K    292 bytes in llama.cpp, 296 in ik_llama.cpp (one more float); never in a file
  36          IQ4_NL_4_4 in llama.cpp, removed before any file could hold it; I2_S in ik_llama.cpp
  41          Q1_0 in llama.cpp, Q1_0_G128 in ik_llama.cpp: the same block

Ids 4 and 5 (Q4_2, Q4_3) were removed before GGUF existed; they have the sizes they had then.
"""

from __future__ import annotations

from dataclasses import dataclass
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
    row_meta_bytes    bytes before each row's blocks
    rows_interleaved  rows that are stored as one group
    tensor_meta_bytes bytes after the last row
    note              what a user should know, or ""
    """

    id: int
    name: str
    block_elems: int
    block_bytes: int
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

F32 = GGMLType(0, "F32", 1, 4)
F16 = GGMLType(1, "F16", 1, 2)
Q4_0 = GGMLType(2, "Q4_0", 32, 18)
Q4_1 = GGMLType(3, "Q4_1", 32, 20)
Q4_2 = GGMLType(4, "Q4_2", 16, 10, note=_REMOVED)
Q4_3 = GGMLType(5, "Q4_3", 16, 12, note=_REMOVED)
Q5_0 = GGMLType(6, "Q5_0", 32, 22)
Q5_1 = GGMLType(7, "Q5_1", 32, 24)
Q8_0 = GGMLType(8, "Q8_0", 32, 34)
Q8_1 = GGMLType(9, "Q8_1", 32, 36, note=_INTERNAL)
Q2_K = GGMLType(10, "Q2_K", 256, 84)
Q3_K = GGMLType(11, "Q3_K", 256, 110)
Q4_K = GGMLType(12, "Q4_K", 256, 144)
Q5_K = GGMLType(13, "Q5_K", 256, 176)
Q6_K = GGMLType(14, "Q6_K", 256, 210)
Q8_K = GGMLType(15, "Q8_K", 256, 292, note=_INTERNAL + "; 296 bytes in ik_llama.cpp")
IQ2_XXS = GGMLType(16, "IQ2_XXS", 256, 66)
IQ2_XS = GGMLType(17, "IQ2_XS", 256, 74)
IQ3_XXS = GGMLType(18, "IQ3_XXS", 256, 98)
IQ1_S = GGMLType(19, "IQ1_S", 256, 50)
IQ4_NL = GGMLType(20, "IQ4_NL", 32, 18)
IQ3_S = GGMLType(21, "IQ3_S", 256, 110)
IQ2_S = GGMLType(22, "IQ2_S", 256, 82)
IQ4_XS = GGMLType(23, "IQ4_XS", 256, 136)
I8 = GGMLType(24, "I8", 1, 1)
I16 = GGMLType(25, "I16", 1, 2)
I32 = GGMLType(26, "I32", 1, 4)
I64 = GGMLType(27, "I64", 1, 8)
F64 = GGMLType(28, "F64", 1, 8)
IQ1_M = GGMLType(29, "IQ1_M", 256, 56)
BF16 = GGMLType(30, "BF16", 1, 2)
Q4_0_4_4 = GGMLType(31, "Q4_0_4_4", 32, 18, rows_interleaved=4, note=_REPACKED)
Q4_0_4_8 = GGMLType(32, "Q4_0_4_8", 32, 18, rows_interleaved=4, note=_REPACKED)
Q4_0_8_8 = GGMLType(33, "Q4_0_8_8", 32, 18, rows_interleaved=8, note=_REPACKED)
TQ1_0 = GGMLType(34, "TQ1_0", 256, 54)
TQ2_0 = GGMLType(35, "TQ2_0", 256, 66)
I2_S = GGMLType(36, "I2_S", 4, 1, tensor_meta_bytes=32, note="BitNet's, in ik_llama.cpp; one scale a tensor")
IQ4_NL_4_8 = GGMLType(37, "IQ4_NL_4_8", 32, 18, rows_interleaved=4, note=_REPACKED)
IQ4_NL_8_8 = GGMLType(38, "IQ4_NL_8_8", 32, 18, rows_interleaved=8, note=_REPACKED)
MXFP4 = GGMLType(39, "MXFP4", 32, 17)
NVFP4 = GGMLType(40, "NVFP4", 64, 36)
Q1_0 = GGMLType(41, "Q1_0", 128, 18, note="Q1_0_G128 in ik_llama.cpp")
Q2_0 = GGMLType(42, "Q2_0", 64, 18)

Q8_0_X4 = GGMLType(97, "Q8_0_X4", 32, 34, note=_INTERNAL)
Q8_1_X4 = GGMLType(98, "Q8_1_X4", 32, 36, note=_INTERNAL)
Q8_2_X4 = GGMLType(99, "Q8_2_X4", 32, 36, note=_INTERNAL)
Q6_0 = GGMLType(133, "Q6_0", 32, 26)
IQ1_BN = GGMLType(134, "IQ1_BN", 64, 13, row_meta_bytes=2)
IQ2_BN = GGMLType(135, "IQ2_BN", 64, 16, row_meta_bytes=4)
Q8_K64 = GGMLType(136, "Q8_K64", 64, 68, note=_INTERNAL)
IQ2_K = GGMLType(137, "IQ2_K", 256, 76)
IQ3_K = GGMLType(138, "IQ3_K", 256, 110)
IQ4_K = GGMLType(139, "IQ4_K", 256, 144)
IQ5_K = GGMLType(140, "IQ5_K", 256, 176)
IQ6_K = GGMLType(141, "IQ6_K", 256, 212)
IQ2_TN = GGMLType(142, "IQ2_TN", 256, 64, row_meta_bytes=4, note="removed from ik_llama.cpp, use IQ2_BN")
IQ1_TN = GGMLType(143, "IQ1_TN", 256, 52, row_meta_bytes=2, note="removed from ik_llama.cpp, use IQ1_BN")
IQ4_KS = GGMLType(144, "IQ4_KS", 256, 136, row_meta_bytes=4)
IQ2_KS = GGMLType(145, "IQ2_KS", 256, 70, row_meta_bytes=2)
IQ4_KSS = GGMLType(146, "IQ4_KSS", 256, 128, row_meta_bytes=4)
Q8_K16 = GGMLType(147, "Q8_K16", 64, 64, row_meta_bytes=20, note=_INTERNAL)
Q8_K32 = GGMLType(148, "Q8_K32", 256, 296, note=_INTERNAL)
Q8_KR8 = GGMLType(149, "Q8_KR8", 256, 296, note=_INTERNAL)
Q8_K128 = GGMLType(150, "Q8_K128", 128, 140, note=_INTERNAL)
Q8_KV = GGMLType(151, "Q8_KV", 32, 32, row_meta_bytes=8)
IQ5_KS = GGMLType(152, "IQ5_KS", 256, 168, row_meta_bytes=4)
IQ2_KT = GGMLType(153, "IQ2_KT", 256, 68, row_meta_bytes=4)
IQ3_KT = GGMLType(154, "IQ3_KT", 256, 100, row_meta_bytes=4)
IQ4_KT = GGMLType(155, "IQ4_KT", 256, 128, row_meta_bytes=4)
IQ3_KS = GGMLType(156, "IQ3_KS", 256, 102, row_meta_bytes=2)
IQ2_KL = GGMLType(157, "IQ2_KL", 256, 86, row_meta_bytes=2)
IQ1_KT = GGMLType(158, "IQ1_KT", 256, 56, row_meta_bytes=4)

Q4_0_R8 = GGMLType(202, "Q4_0_R8", 32, 18, rows_interleaved=8)
Q5_0_R4 = GGMLType(206, "Q5_0_R4", 32, 22, rows_interleaved=4)
Q8_0_R8 = GGMLType(208, "Q8_0_R8", 32, 34, rows_interleaved=8)
Q2_K_R4 = GGMLType(210, "Q2_K_R4", 256, 84, rows_interleaved=4)
Q3_K_R4 = GGMLType(211, "Q3_K_R4", 256, 110, rows_interleaved=4)
Q4_K_R4 = GGMLType(212, "Q4_K_R4", 256, 144, rows_interleaved=4)
Q5_K_R4 = GGMLType(213, "Q5_K_R4", 256, 176, rows_interleaved=4)
Q6_K_R4 = GGMLType(214, "Q6_K_R4", 256, 210, rows_interleaved=4)
IQ2_XXS_R4 = GGMLType(216, "IQ2_XXS_R4", 256, 66, rows_interleaved=4)
IQ2_XS_R4 = GGMLType(217, "IQ2_XS_R4", 256, 74, rows_interleaved=4)
IQ3_XXS_R4 = GGMLType(218, "IQ3_XXS_R4", 256, 98, rows_interleaved=4)
IQ1_S_R4 = GGMLType(219, "IQ1_S_R4", 32, 6, row_meta_bytes=2, rows_interleaved=4)
IQ4_NL_R4 = GGMLType(220, "IQ4_NL_R4", 32, 18, rows_interleaved=4)
IQ3_S_R4 = GGMLType(221, "IQ3_S_R4", 256, 110, rows_interleaved=4)
IQ2_S_R4 = GGMLType(222, "IQ2_S_R4", 256, 82, rows_interleaved=4)
IQ4_XS_R8 = GGMLType(223, "IQ4_XS_R8", 256, 136, rows_interleaved=8)
IQ1_M_R4 = GGMLType(229, "IQ1_M_R4", 32, 7, row_meta_bytes=2, rows_interleaved=4)
BF16_R16 = GGMLType(230, "BF16_R16", 1, 2, rows_interleaved=16)
Q6_0_R4 = GGMLType(233, "Q6_0_R4", 32, 26, rows_interleaved=4)
IQ2_BN_R4 = GGMLType(335, "IQ2_BN_R4", 64, 16, row_meta_bytes=4, rows_interleaved=4)
IQ2_K_R4 = GGMLType(337, "IQ2_K_R4", 256, 76, rows_interleaved=4)
IQ3_K_R4 = GGMLType(338, "IQ3_K_R4", 256, 110, rows_interleaved=4)
IQ4_K_R4 = GGMLType(339, "IQ4_K_R4", 256, 144, rows_interleaved=4)
IQ5_K_R4 = GGMLType(340, "IQ5_K_R4", 256, 176, rows_interleaved=4)
IQ4_KS_R4 = GGMLType(344, "IQ4_KS_R4", 256, 136, row_meta_bytes=4, rows_interleaved=4)
IQ5_KS_R4 = GGMLType(352, "IQ5_KS_R4", 256, 168, row_meta_bytes=4, rows_interleaved=4)
MXFP4_R8 = GGMLType(353, "MXFP4_R8", 32, 17, rows_interleaved=8)
Q8_K_R16 = GGMLType(397, "Q8_K_R16", 256, 258, rows_interleaved=16)
Q8_KV_R8 = GGMLType(398, "Q8_KV_R8", 32, 32, row_meta_bytes=4, rows_interleaved=8)
Q8_K_R8 = GGMLType(399, "Q8_K_R8", 256, 258, rows_interleaved=8)

TYPES: tuple[GGMLType, ...] = tuple(value for value in list(vars().values()) if isinstance(value, GGMLType))

_BY_ID = {type_.id: type_ for type_ in TYPES}
_BY_NAME.update({type_.name: type_ for type_ in TYPES}, Q1_0_G128=Q1_0)


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
