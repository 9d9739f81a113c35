"""IQ1_M_R4: weights of 1.75 bits of four rows at a time, 32 of each to a block of 28 bytes.

A group starts with the d of its rows, float16. Then come its blocks:

    bytes       field
    0 .. 15     qs      the lower 8 bits of indices, points of the grid IQ1: byte 4 * g + k is of group g of 8
                        weights in row k
    16 .. 23    qh      byte 4 * h + k is of groups 2 * h (lower half) and 2 * h + 1 (upper half) in row k:
                        the upper 3 bits of the index, then the shift: 1/8 if clear, -1/8 if set
    24 .. 27    scales  byte k has the scale sc of groups 0 and 1 in row k in its lower half, that of groups 2
                        and 3 in the upper

The value of a weight, where v is -1, 0 or 1 by the grid point:

    d * sc * (v + shift)

It is no regrouping of IQ1_M, which has a d for 256 weights.

Source: block_iq1_m_r4 and dequantize_row_iq1_m_r4 of ik_llama.cpp 8337e4c.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from gguf_tools.format.ggml_types import IQ1_M_R4
from quantize.formats.base import Bytes, Floats32
from quantize.formats.ik.rows import decode_groups
from quantize.formats.iq.iq1 import decode_group, point_values
from quantize.simd.floats import float_at
from quantize.simd.kernel import kernel


def decode(data: Bytes, n_cols: int) -> Floats32:
    """Return the weights of rows of IQ1_M_R4."""
    return decode_groups(data, n_cols, IQ1_M_R4, _decode, (point_values(),))


_ROWS = IQ1_M_R4.rows_interleaved
_BYTES = _ROWS * IQ1_M_R4.block_bytes
_ELEMS = 32
_META = 2 * _ROWS


@kernel
def _decode(data: Bytes, values: npt.NDArray[np.float32], rows: npt.NDArray[np.float32]) -> None:
    for row in range(len(rows)):
        group, k = data[row // _ROWS], row % _ROWS
        d = float_at(group, 2 * k)
        for j in range(rows.shape[1] // _ELEMS):
            block = group[_META + j * _BYTES :]
            for g in range(4):
                upper = block[16 + 4 * (g // 2) + k] >> 4 * (g % 2)
                scale = d * np.float32(block[24 + k] >> 4 * (g // 2) & 0xF)
                index = block[4 * g + k] | (upper & 7) << 8
                decode_group(values, index, upper >> 3 & 1, scale, rows[row], j * _ELEMS + 8 * g)
