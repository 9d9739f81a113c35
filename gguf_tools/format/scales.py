"""The floating-point numbers inside tensor data, and how many of them are not finite.

One NaN or infinite scale turns a whole block, and soon all of a model's output, into NaN. Codes inside a
block can't do that, so these numbers are all that a check needs to read. The rows of block_layouts.py say
where they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gguf_tools.format.block_layouts import LAYOUTS, BlockLayout
from gguf_tools.format.ggml_types import GGMLType
from gguf_tools.format.header import Endian

if TYPE_CHECKING:
    import numpy as np

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
