"""F16: weights as halves, 2 bytes each.

    bytes   field
    0 .. 1  x  float16: 1 sign, 5 exponent (bias 15), 10 fraction bits

    weight = x

Encoding rounds to nearest even, keeps subnormals, and turns what is too large into infinity; a caller
that does not want that checks the result. Every NaN becomes 0x7E00 with its sign.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from gguf_tools.ggml_types import F16
from quantize.formats.base import Blocks, QuantFormat, Rows, Weights, as_source, check_shape
from quantize.simd.half import from_half_bits, to_half_bits
from quantize.simd.kernel import kernel
from quantize.simd.tiles import read_item

BLOCK = np.dtype(np.float16)

_INFINITY = 0x7C00
_QUIET = 0x200


def dequantize(blocks: Blocks) -> npt.NDArray[np.float32]:
    """Return float16 (n_rows, n_cols) as float32, exactly; a NaN becomes a quiet one."""
    rows = np.empty(blocks.shape, np.float32)
    _decode(np.ascontiguousarray(blocks).view(np.uint16).reshape(-1), rows.reshape(-1))
    return rows


def quantize(rows: Rows, weights: Weights) -> Blocks:
    """Return `rows` as float16; the same array when they already are.

    rows     float32, float16 or bfloat16 (n_rows, n_cols)
    weights  not used
    raises   ShapeError if rows or weights do not fit
    """
    check_shape(rows, weights, F16)
    if rows.dtype == BLOCK:
        return rows
    halves = np.empty(rows.shape, np.uint16)
    _encode(as_source(rows), halves.reshape(-1))
    return halves.view(BLOCK)


# Plain loops over scalars: LLVM turns these into vectors of its own accord.


@kernel
def _encode(source: Rows, halves: npt.NDArray[np.uint16]) -> None:
    for i in range(source.size):
        halves[i] = to_half_bits(read_item(source, i))


@kernel
def _decode(halves: npt.NDArray[np.uint16], values: npt.NDArray[np.float32]) -> None:
    for i in range(halves.size):
        half = halves[i]
        values[i] = from_half_bits(half | _QUIET if (half & 0x7FFF) > _INFINITY else half)


FORMAT = QuantFormat(F16, BLOCK, quantize, dequantize)
