"""Finding NaN and infinity in weights.

A non-finite weight poisons its block, and through attention every token that the model ever computes.
The reference notices when a model is run; we notice while its rows pass by.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import numpy.typing as npt
from numba import njit

from gguf_tools.errors import BadWeights

# Sign and mantissa bits masked away, an all-ones exponent is infinity or NaN, in all three formats.
_EXPONENT = {
    np.dtype(np.float32): (np.uint32, np.uint32(0x7F800000)),
    np.dtype(np.float16): (np.uint16, np.uint16(0x7C00)),
    np.dtype(ml_dtypes.bfloat16): (np.uint16, np.uint16(0x7F80)),
}
_RUN = 1024


@njit(nogil=True, cache=True)
def _first_with_exponent(bits, exponent):  # type: ignore[no-untyped-def]
    # A run is reduced without a branch, so the loop vectorises; only a run that holds one is searched.
    for start in range(0, bits.size, _RUN):
        run = bits[start : start + _RUN]
        found = 0
        for i in range(run.size):
            found |= (run[i] & exponent) == exponent
        if found:
            for i in range(run.size):
                if (run[i] & exponent) == exponent:
                    return start + i
    return -1


def first_nonfinite(rows: npt.NDArray) -> int:
    """Return the flat index of the first NaN or infinity in `rows`, or -1.

    rows  float32, float16 or bfloat16, C-contiguous, any shape
    """
    unsigned, exponent = _EXPONENT[rows.dtype]
    return int(_first_with_exponent(rows.reshape(-1).view(unsigned), exponent))


def check_finite(rows: npt.NDArray, tensor: str, row_start: int, what: str = "weight") -> None:
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
