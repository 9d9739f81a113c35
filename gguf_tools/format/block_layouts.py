"""The bytes of a type: the fields of its blocks, read from the rows of ggml_types.py.

From here come the dtypes that the codecs read blocks by (quantize/formats/base.py: block_dtype), where the
floating-point numbers are that must be finite (`SCALES`), and which numbers a byte order turns around
(`swap_bytes`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gguf_tools.errors import FormatError
from gguf_tools.format.ggml_types import SWAPPED, TYPES, GGMLType
from gguf_tools.format.header import Endian

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True)
class Field:
    """Numbers that stand side by side.

    kind    as in ggml_types.py
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


def _layout(type_: GGMLType) -> BlockLayout:
    row, _, block = type_.fields.rpartition(";")
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


LAYOUTS: Mapping[str, BlockLayout] = {type_.name: _layout(type_) for type_ in TYPES if type_.fields}
"""By name of the type."""


def can_swap(type_: GGMLType) -> bool:
    """Whether `swap_bytes` knows this type."""
    return type_.name in SWAPPED


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


def _floats(fields: tuple[Field, ...]) -> tuple[Field, ...]:
    return tuple(field for field in fields if field.kind in EXPONENTS)


SCALES: Mapping[str, BlockLayout] = {
    name: BlockLayout(_floats(layout.row), _floats(layout.block))
    for name, layout in LAYOUTS.items()
    if _floats((*layout.row, *layout.block))
}
"""The floating-point numbers of a type, by its name; one without any is not in it.

One NaN or infinite scale turns a whole block, and soon all of a model's output, into NaN. Codes inside a
block can't do that, so these numbers are all that a check needs to read.
"""


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
    blocks = table[:, meta_bytes:].reshape(len(table), -1, group * type_.block_bytes)
    for place, fields in ((table, scales.row), (blocks, scales.block)):
        for field in fields:
            start = group * field.offset
            numbers = place[..., start : start + group * field.item_bytes]
            bad += _nonfinite(numbers, field.kind, endian)
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
