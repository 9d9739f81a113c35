"""Tensor data in the other byte order.

A big-endian GGUF file is meant for big-endian machines: the numbers of its header are big-endian, and so is
every number inside its blocks that the machine reads as a whole: 16-bit scales, and the 32 high bits
of Q5_0 and Q5_1. Bytes and nibbles stay where they are. `FileLayout` writes the header in the order
asked for; the code that fills the data passes them through `swap_bytes`.

The list has only types whose blocks ggml reads through these fields and single bytes. The others (Q3_K, most
IQ types) are read through casts, and no big-endian file exists that would settle their order.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from gguf_tools.errors import FormatError
from gguf_tools.format.ggml_types import GGMLType

if TYPE_CHECKING:
    import numpy as np

#: (offset, size) of the numbers in a block, by type name.
_NUMBERS: Mapping[str, tuple[tuple[int, int], ...]] = {
    "F32": ((0, 4),),
    "F16": ((0, 2),),
    "BF16": ((0, 2),),
    "F64": ((0, 8),),
    "I8": (),
    "I16": ((0, 2),),
    "I32": ((0, 4),),
    "I64": ((0, 8),),
    "Q4_0": ((0, 2),),
    "Q4_1": ((0, 2), (2, 2)),
    "Q5_0": ((0, 2), (2, 4)),
    "Q5_1": ((0, 2), (2, 2), (4, 4)),
    "Q8_0": ((0, 2),),
    "Q2_K": ((80, 2), (82, 2)),
    "Q4_K": ((0, 2), (2, 2)),
    "Q5_K": ((0, 2), (2, 2)),
    "Q6_K": ((208, 2),),
    "IQ4_NL": ((0, 2),),
    "TQ1_0": ((52, 2),),
    "TQ2_0": ((64, 2),),
    "MXFP4": (),
    "NVFP4": (),
    "Q1_0": ((0, 2),),
    "Q2_0": ((0, 2),),
}


def can_swap(type_: GGMLType) -> bool:
    """Whether `swap_bytes` knows this type."""
    return type_.name in _NUMBERS


def swap_bytes(type_: GGMLType, data: np.ndarray) -> np.ndarray:
    """Return blocks in the other byte order.

    data     uint8, any shape, C-contiguous: whole blocks of `type_`
    returns  uint8, the same shape, a new array
    raises   FormatError if the type's order on big-endian machines isn't known
    """
    if not can_swap(type_):
        raise FormatError(f"{type_.name} has no known big-endian form; use F32, F16, BF16 or Q8_0")
    swapped = data.copy()
    blocks, swapped_blocks = (array.reshape(-1, type_.block_bytes) for array in (data, swapped))
    for offset, size in _NUMBERS[type_.name]:
        swapped_blocks[:, offset : offset + size] = blocks[:, offset : offset + size][:, ::-1]
    return swapped
