"""Finding NaN and infinity in weights.

A non-finite weight poisons its block, and through attention every token that the model ever computes.
llama.cpp notices when the model runs; we notice while its rows pass by.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from gguf_tools.errors import BadWeights
from quantize.formats.base import as_source
from quantize.simd.kernel import inlinable, kernel
from quantize.simd.lane_memory import load
from quantize.simd.lanes import LANES, any_lane, maximum, splat

# Sign and mantissa bits masked away, an all-ones exponent is infinity or NaN, in all three formats.
_EXPONENT = {
    np.dtype(np.float32): (np.int32, 0x7F800000),
    np.dtype(np.float16): (np.int16, 0x7C00),
    np.dtype(ml_dtypes.bfloat16): (np.uint16, 0x7F80),
}
_RUN = 1024


@kernel
def _first_with_exponent(bits: npt.NDArray[Any], exponent: int) -> int:
    """Return the index of the first item with all bits of `exponent` set, or -1."""
    whole = bits.size // _RUN * _RUN
    for start in range(0, whole, _RUN):
        largest = splat(0)
        for i in range(start, start + _RUN, LANES):  # without a branch; only a run that holds one is searched
            largest = maximum(load(bits, i) & exponent, largest)
        if any_lane(largest == exponent):
            return _search(bits, exponent, start)
    return _search(bits, exponent, whole)


@inlinable
def _search(bits: npt.NDArray[Any], exponent: int, start: int) -> int:
    for i in range(start, bits.size):
        if bits[i] & exponent == exponent:
            return i
    return -1


def first_nonfinite(rows: npt.NDArray[Any]) -> int:
    """Return the flat index of the first NaN or infinity in `rows`, or -1.

    rows  float32, float16 or bfloat16, C-contiguous, any shape
    """
    integer, exponent = _EXPONENT[rows.dtype]
    return int(_first_with_exponent(as_source(rows).view(integer), exponent))


def check_finite(rows: npt.NDArray[Any], tensor: str, row_start: int, what: str = "weight") -> None:
    """Raise BadWeights, naming row and column, when `rows` (n_rows, n_cols) hold a NaN or an infinity.

    row_start  the number of the first of these rows, for the message
    """
    index = first_nonfinite(rows)
    if index >= 0:
        row, column = divmod(index, rows.shape[-1])
        value = float(rows.reshape(-1)[index])
        raise BadWeights(
            f"{tensor}: {what} at row {row_start + row}, column {column} is {value}, expected a finite number"
            " (the checkpoint is damaged, or overflowed when it was saved)"
        )
