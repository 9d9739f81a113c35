"""IQ4_KS: 256 weights in 136 bytes, 4.25 bits each, on sixteen levels out of two sets, a scale for the row.

A row starts with d, float32. Then come its blocks:

    bytes     field
    0 .. 7    scales  bits 1 .. 7 of byte j are the scale sc[j]; bit 0 is set if sub-block j uses the second
                      set of LEVELS_4
    8 .. 135  qs      codes q of 4 bits: 16 bytes hold 32, the lower halves first

The value of weight i = 0 .. 31 in sub-block j = 0 .. 7:

    d * (2 * sc[j] - 127) * level[q[32 * j + i]]

Source: block_iq4_ks and dequantize_row_iq4_ks of ik_llama.cpp 8337e4c.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from gguf_tools.ggml_types import IQ4_KS
from quantize.formats.base import Bytes, Floats32
from quantize.formats.ik.levels import LEVELS_4, SUPER_ELEMS, decode_scaled_rows
from quantize.simd.kernel import kernel

BLOCK = np.dtype([("scales", "u1", 8), ("qs", "u1", 128)])


def decode(data: Bytes, n_cols: int) -> Floats32:
    """Return the weights of rows of IQ4_KS."""
    return decode_scaled_rows(data, n_cols, IQ4_KS, "<f4", _decode)


_BYTES = BLOCK.itemsize


@kernel
def _decode(
    data: npt.NDArray[np.uint8], scales: npt.NDArray[np.float32], out: npt.NDArray[np.float32]
) -> None:
    for row in range(len(out)):
        for k in range(out.shape[1] // SUPER_ELEMS):
            block = data[row, k * _BYTES : (k + 1) * _BYTES]
            for j in range(8):
                first = 16 * (block[j] & 1)
                scale = scales[row] * np.float32((block[j] & 254) - 127)
                codes = block[8 + 16 * j :]
                weights = out[row, k * SUPER_ELEMS + 32 * j :]
                for i in range(16):
                    weights[i] = scale * LEVELS_4[first + (codes[i] & 0xF)]
                    weights[i + 16] = scale * LEVELS_4[first + (codes[i] >> 4)]
