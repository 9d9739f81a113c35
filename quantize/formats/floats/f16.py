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

from gguf_tools.format.ggml_types import F16
from quantize.formats.base import Bytes, Floats32, QuantFormat, Rows, as_source, check_data, check_rows
from quantize.importances.weighting import Weighting
from quantize.simd.floats import from_half_bits, to_half_bits
from quantize.simd.kernel import kernel
from quantize.simd.tiles import read_item

BLOCK = np.dtype(np.float16)

_INFINITY = 0x7C00
_QUIET = 0x200


def encode(rows: Rows, weighting: Weighting | None) -> Bytes:
    """Return the bytes of `rows` as float16; a view of them when they already are."""
    check_rows(rows, weighting, F16)
    if rows.dtype == BLOCK:
        return np.ascontiguousarray(rows).view(np.uint8)
    halves = np.empty(rows.shape, np.uint16)
    _encode(as_source(rows), halves.reshape(-1))
    return halves.view(np.uint8)


def decode(data: Bytes, n_cols: int) -> Floats32:
    """Return float16 as float32, exactly; a NaN becomes a quiet one."""
    check_data(data, n_cols, F16)
    rows = np.empty((len(data), n_cols), np.float32)
    halves = np.ascontiguousarray(data).view(np.uint16).reshape(-1)
    halves.flags.writeable = False
    _decode(halves, rows.reshape(-1))
    return rows


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


FORMAT = QuantFormat(F16, encode, decode)
