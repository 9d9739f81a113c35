"""BF16: the upper halves of float32 weights, 2 bytes each.

    bytes   field
    0 .. 1  x  bfloat16: 1 sign, 8 exponent (bias 127), 7 fraction bits

    weight = x

Encoding rounds to nearest even and keeps subnormals. A NaN keeps its upper bits and becomes a quiet one.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import numpy.typing as npt

from gguf_tools.ggml_types import BF16
from quantize.formats.base import Blocks, QuantFormat, Rows, Weights, as_source, check_shape
from quantize.formats.floats import f32
from quantize.simd.half import to_bfloat_bits
from quantize.simd.kernel import kernel
from quantize.simd.tiles import read_item

BLOCK = np.dtype(ml_dtypes.bfloat16)


def dequantize(blocks: Blocks) -> npt.NDArray[np.float32]:
    """Return bfloat16 (n_rows, n_cols) as float32, exactly."""
    return f32.quantize(blocks, None)


def quantize(rows: Rows, weights: Weights) -> Blocks:
    """Return `rows` as bfloat16; the same array when they already are.

    rows     float32, float16 or bfloat16 (n_rows, n_cols)
    weights  not used
    raises   ShapeError if rows or weights do not fit
    """
    check_shape(rows, weights, BF16)
    if rows.dtype == BLOCK:
        return rows
    halves = np.empty(rows.shape, np.uint16)
    _encode(as_source(rows), halves.reshape(-1))
    return halves.view(BLOCK)


@kernel
def _encode(source: Rows, halves: npt.NDArray[np.uint16]) -> None:
    for i in range(source.size):
        halves[i] = to_bfloat_bits(read_item(source, i))


FORMAT = QuantFormat(BF16, BLOCK, quantize, dequantize)
