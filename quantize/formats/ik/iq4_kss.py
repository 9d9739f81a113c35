"""IQ4_KSS: 256 weights in 128 bytes, 4 bits each, on sixteen levels out of two sets, a scale for the row.

A row starts with d, float32. Then come its blocks, eight sub-blocks of eight 16-bit words each. Bit 0 of word
k is bit k of s, the scale of the sub-block. Its other 15 bits, shifted right by one and combined with
themselves by exclusive or, are codes q of 4 bits: byte i of the sixteen holds q[i] in its lower half,
q[i + 16] in the upper. So the bits between two neighbours decide, and one bit of each word is free for s.

The value of weight i = 0 .. 31 in a sub-block, whose levels are the second set of LEVELS_4 if bit 0 of s is
set:

    d * ((s & 254) - 127) * level[q[i]]

Source: block_iq4_kss and dequantize_row_iq4_kss of ik_llama.cpp 8337e4c.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from gguf_tools.ggml_types import IQ4_KSS
from quantize.formats.base import Bytes, Floats32
from quantize.formats.ik.levels import LEVELS_4, decode_scaled_rows
from quantize.simd.kernel import kernel

BLOCK = np.dtype([("qs", "<u2", (8, 8))])


def decode(data: Bytes, n_cols: int) -> Floats32:
    """Return the weights of rows of IQ4_KSS."""
    return decode_scaled_rows(data, n_cols, IQ4_KSS, "<f4", _decode)


_BYTES = 16  # of a sub-block


@kernel
def _decode(
    data: npt.NDArray[np.uint8], scales: npt.NDArray[np.float32], out: npt.NDArray[np.float32]
) -> None:
    for row in range(len(out)):
        for j in range(out.shape[1] // 32):
            words = data[row, j * _BYTES : (j + 1) * _BYTES]
            code = 0
            for k in range(8):
                code |= (words[2 * k] & 1) << k
            first = 16 * (code & 1)
            scale = scales[row] * np.float32((code & 254) - 127)
            weights = out[row, 32 * j :]
            for k in range(8):
                word = words[2 * k] & 254 | words[2 * k + 1] << 8
                word ^= word >> 1
                for i in range(2):
                    packed = word >> 8 * i
                    weights[2 * k + i] = scale * LEVELS_4[first + (packed & 0xF)]
                    weights[2 * k + i + 16] = scale * LEVELS_4[first + (packed >> 4 & 0xF)]
