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

from gguf_tools.format.ggml_types import BF16
from quantize.formats.base import Bytes, Floats32, QuantFormat, Rows, as_source, check_data, check_rows
from quantize.formats.floats import f32
from quantize.importances.weighting import Weighting
from quantize.simd.floats import to_bfloat_bits
from quantize.simd.kernel import kernel
from quantize.simd.tiles import read_item

BLOCK = np.dtype(ml_dtypes.bfloat16)


def encode(rows: Rows, weighting: Weighting | None) -> Bytes:
    """Return the bytes of `rows` as bfloat16; a view of them when they already are."""
    check_rows(rows, weighting, BF16)
    if rows.dtype == BLOCK:
        return np.ascontiguousarray(rows).view(np.uint8)
    halves = np.empty(rows.shape, np.uint16)
    _encode(as_source(rows), halves.reshape(-1))
    return halves.view(np.uint8)


def decode(data: Bytes, n_cols: int) -> Floats32:
    """Return bfloat16 as float32, exactly."""
    check_data(data, n_cols, BF16)
    return f32.widen(np.ascontiguousarray(data).view(BLOCK))


@kernel
def _encode(source: Rows, halves: npt.NDArray[np.uint16]) -> None:
    for i in range(source.size):
        halves[i] = to_bfloat_bits(read_item(source, i))


FORMAT = QuantFormat(BF16, encode, decode)
