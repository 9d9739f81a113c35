"""Tensor data in the other byte order.

A big-endian GGUF file is meant for big-endian machines: the numbers of its header are big-endian, and so is
every number inside its blocks that the machine reads as a whole: 16-bit scales, and the 32 high bits
of Q5_0 and Q5_1. Bytes and nibbles stay where they are. `FileLayout` writes the header in the order
asked for; the code that fills the data passes them through `swap_bytes`.

The list has only types whose blocks ggml reads through these fields and single bytes. The others (Q3_K, most
IQ types) are read through casts, and no big-endian file exists that would settle their order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gguf_tools.errors import FormatError
from gguf_tools.format.block_layouts import LAYOUTS
from gguf_tools.format.ggml_types import GGMLType

if TYPE_CHECKING:
    import numpy as np

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
    """Return blocks in the other byte order.

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
