"""F32: weights as they are, 4 bytes each.

bytes   field
0 .. 3  x  float32, little-endian

weight = x
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from gguf_tools.ggml_types import F32
from quantize.formats.base import Blocks, QuantFormat, Rows, Weights, as_source, check_shape
from quantize.simd.kernel import kernel
from quantize.simd.tiles import read_item

BLOCK = np.dtype(np.float32)


def dequantize(blocks: Blocks) -> npt.NDArray[np.float32]:
    """Return `blocks`, float32 (n_rows, n_cols), themselves."""
    return blocks


def quantize(rows: Rows, weights: Weights) -> Blocks:
    """Return `rows` as float32, exactly; the same array when they already are.

    rows     float32, float16 or bfloat16 (n_rows, n_cols)
    weights  not used
    raises   ShapeError if rows or weights do not fit
    """
    check_shape(rows, weights, F32)
    if rows.dtype == BLOCK:
        return np.ascontiguousarray(rows)
    widened = np.empty(rows.shape, np.float32)
    _widen(as_source(rows), widened.reshape(-1))
    return widened


@kernel
def _widen(source: Rows, widened: npt.NDArray[np.float32]) -> None:
    for i in range(source.size):
        widened[i] = read_item(source, i)


FORMAT = QuantFormat(F32, BLOCK, quantize, dequantize)
