"""IQ2_KS: 256 weights in 70 bytes, 2.1875 bits each, on four levels out of two sets, a scale for the row.

A row starts with d, float16. Then come its blocks:

    bytes    field
    0 .. 1   extra   bit j is set if sub-block j uses the second set of LEVELS_2; bit 8 + j is bit 4 of the
                     scale sc[j]
    2 .. 5   scales  bits 0 .. 3: byte j holds sc[2 * j] in its lower half, sc[2 * j + 1] in the upper
    6 .. 69  qs      codes q of 2 bits: 32 bytes hold 128, the lowest bits first

The value of weight i = 0 .. 31 in sub-block j = 0 .. 7:

    d * (sc[j] - 16) * level[q[32 * j + i]]

Source: block_iq2_ks and dequantize_row_iq2_ks of ik_llama.cpp 8337e4c.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from gguf_tools.ggml_types import IQ2_KS
from quantize.formats.base import Bytes, Floats32
from quantize.formats.ik.levels import LEVELS_2, SUPER_ELEMS, decode_scaled_rows
from quantize.simd.kernel import kernel

BLOCK = np.dtype([("extra", "<u2"), ("scales", "u1", 4), ("qs", "u1", 64)])


def decode(data: Bytes, n_cols: int) -> Floats32:
    """Return the weights of rows of IQ2_KS."""
    return decode_scaled_rows(data, n_cols, IQ2_KS, "<f2", _decode)


_BYTES = BLOCK.itemsize


@kernel
def _decode(
    data: npt.NDArray[np.uint8], scales: npt.NDArray[np.float32], out: npt.NDArray[np.float32]
) -> None:
    for row in range(len(out)):
        for k in range(out.shape[1] // SUPER_ELEMS):
            block = data[row, k * _BYTES : (k + 1) * _BYTES]
            for j in range(8):
                second = block[0] >> j & 1
                code = block[2 + j // 2] >> 4 * (j % 2) & 0xF | (block[1] >> j & 1) << 4
                scale = scales[row] * np.float32(code - 16)
                codes = block[6 + 32 * (j // 4) :]
                weights = out[row, k * SUPER_ELEMS + 32 * j :]
                for i in range(32):
                    weights[i] = scale * LEVELS_2[4 * second + (codes[i] >> 2 * (j % 4) & 3)]
