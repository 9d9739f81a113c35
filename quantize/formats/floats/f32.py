"""F32: weights as they are, 4 bytes each.

bytes   field
0 .. 3  x  float32, little-endian

weight = x
"""

from __future__ import annotations

import numpy as np

from gguf_tools.format.ggml_types import F32
from quantize.formats.base import Bytes, Floats32, QuantFormat, Rows, as_source, check_data, check_rows
from quantize.importances.weighting import Weighting
from quantize.simd.tiles import widen as widen_items

BLOCK = np.dtype(np.float32)


def encode(rows: Rows, weighting: Weighting | None) -> Bytes:
    """Return the bytes of `rows` as float32, exactly; a view of them when they already are."""
    check_rows(rows, weighting, F32)
    return widen(rows).view(np.uint8)


def decode(data: Bytes, n_cols: int) -> Floats32:
    """Return `data` themselves as float32."""
    check_data(data, n_cols, F32)
    return np.ascontiguousarray(data).view(BLOCK)


def widen(rows: Rows) -> Floats32:
    """Return `rows` as float32, exactly, C-contiguous; the same array when they already are."""
    if rows.dtype == BLOCK:
        return np.ascontiguousarray(rows)
    widened = np.empty(rows.shape, np.float32)
    widen_items(as_source(rows), widened.reshape(-1))
    return widened


FORMAT = QuantFormat(F32, encode, decode)
