"""The floating-point scales in the rows of a type, and the derivative of a loss by them.

A weight is a sum of products of codes and scales: d * q, or d * q - dmin * m. With all codes left as they
are, rows are linear in each scale, and what one contributes is what they decode to when the others are zero.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from gguf_tools.format.block_layouts import LAYOUTS, Field
from gguf_tools.format.ggml_types import GGMLType
from quantize.formats import decodable, get_decoder
from quantize.formats.base import Bytes, Floats32

_DTYPES: dict[str, np.dtype[np.floating[Any]]] = {"f2": np.dtype("<f2"), "f4": np.dtype("<f4")}


@dataclass(frozen=True)
class RowScales:
    """Where rows of a type and length keep their scales.

    type     of the rows
    n_cols   columns of a row
    places   int64 (n_groups, n_fields): the first byte of each scale in a row. A group is a block, or the
             whole row; a field is a scale or a minimum
    dtype    of a scale as it is stored
    """

    type: GGMLType
    n_cols: int
    places: npt.NDArray[np.int64]
    dtype: np.dtype[np.floating[Any]]

    @property
    def shape(self) -> tuple[int, int]:
        """Groups of a row, and fields of a group."""
        n_groups, n_fields = self.places.shape
        return n_groups, n_fields

    def read(self, rows: Bytes) -> Floats32:
        """Read the scales of rows, uint8 (n_rows, row bytes); float32 (n_rows, n_groups, n_fields)."""
        stored = np.ascontiguousarray(rows[:, self._bytes])
        scales: Floats32 = stored.view(self.dtype)[..., 0].astype(np.float32)
        return scales

    def replaced(self, rows: Bytes, scales: Floats32) -> Bytes:
        """Return a copy of rows with other scales, which are rounded to what the type stores."""
        rows = rows.copy()
        rows[:, self._bytes] = scales.astype(self.dtype)[..., None].view(np.uint8)
        return rows

    def by_change(self, rows: Bytes, by_weight: Floats32) -> Floats32:
        """Compute the derivative of a loss by the relative change of each scale.

        rows       uint8 (n_rows, row bytes)
        by_weight  the derivative by each weight, float32 (n_rows, n_cols)
        returns    float32 (n_rows, n_groups, n_fields)
        """
        n_groups, n_fields = self.shape
        decode, scales = get_decoder(self.type), self.read(rows)
        derivative = np.empty((len(rows), n_groups, n_fields), np.float32)
        for field in range(n_fields):
            alone = np.zeros_like(scales)
            alone[..., field] = scales[..., field]
            part = decode(rows if n_fields == 1 else self.replaced(rows, alone), self.n_cols)
            np.einsum(
                "rgc,rgc->rg",
                part.reshape(len(rows), n_groups, -1),
                by_weight.reshape(len(rows), n_groups, -1),
                out=derivative[..., field],
            )
        return derivative

    @property
    def _bytes(self) -> npt.NDArray[np.int64]:
        """Every byte of every scale in a row, int64 (n_groups, n_fields, item size)."""
        return self.places[..., None] + np.arange(self.dtype.itemsize)


@lru_cache
def row_scales(type_: GGMLType, n_cols: int) -> RowScales | None:
    """Find the scales of a type; None if it has none that can be moved.

    None have types of whole floats, types that interleave rows, and those whose scales are powers of two or
    are spread over several numbers.
    """
    layout = LAYOUTS.get(type_.name)
    if layout is None or type_.name not in decodable():
        return None
    if not type_.is_quantized or type_.rows_interleaved > 1:
        return None
    of_row, of_block = _floats(layout.row), _floats(layout.block)
    fields = of_row or of_block
    if not fields or (of_row and of_block) or len({field.kind for field in fields}) > 1:
        return None
    offsets = np.array([field.offset for field in fields], np.int64)
    n_blocks = 1 if of_row else n_cols // type_.block_elems
    starts = 0 if of_row else type_.row_meta_bytes + type_.block_bytes * np.arange(n_blocks)[:, None]
    places = np.broadcast_to(offsets + starts, (n_blocks, len(offsets)))
    return RowScales(type_, n_cols, places, _DTYPES[fields[0].kind])


def _floats(fields: tuple[Field, ...]) -> tuple[Field, ...]:
    return tuple(field for field in fields if field.kind in _DTYPES and field.count == 1)
