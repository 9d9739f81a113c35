"""Q6_0: 32 weights in 26 bytes, 6.5 bits each.

bytes     field
0 .. 1    d   float16
2 .. 9    qh  the upper 2 of the 6 bits of the codes q: byte i holds those of q[i], q[i + 16], q[i + 8] and
              q[i + 24], lowest bits first
10 .. 25  qs  the other 4: byte i holds those of q[i] in its lower half, of q[i + 16] in the upper

weight[i] = d * (q[i] - 32)

Source: block_q6_0 and dequantize_row_q6_0 of ik_llama.cpp 8337e4c.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from gguf_tools.ggml_types import Q6_0
from quantize.formats.base import Bytes, Floats32, decode_blocks
from quantize.formats.blocks_of_32.scales import ELEMS, float_at
from quantize.simd.kernel import kernel

BLOCK = np.dtype([("d", "<u2"), ("qh", "u1", 8), ("qs", "u1", 16)])


def decode(data: Bytes, n_cols: int) -> Floats32:
    """Return the weights of rows of Q6_0."""
    return decode_blocks(data, n_cols, Q6_0, _decode)


_BYTES = BLOCK.itemsize


@kernel
def _decode(data: npt.NDArray[np.uint8], out: npt.NDArray[np.float32]) -> None:
    for k in range(data.size // _BYTES):
        block = data[k * _BYTES : (k + 1) * _BYTES]
        weights = out[k * ELEMS : (k + 1) * ELEMS]
        d = float_at(block, 0)
        for half in range(2):
            for i in range(8):
                upper = block[2 + i] >> 4 * half
                packed = block[10 + 8 * half + i]
                weights[8 * half + i] = d * np.float32((packed & 0xF | (upper & 3) << 4) - 32)
                weights[8 * half + i + 16] = d * np.float32((packed >> 4 | (upper & 12) << 2) - 32)
