"""IQ2_K: 256 weights in 76 bytes, 2.375 bits each, on four levels out of two sets.

    bytes     field
    0 .. 1    d       float16
    2 .. 3    extra   bit j is set if sub-block j uses the second set of LEVELS_2
    4 .. 11   scales  sc of 4 bits: byte j holds sc[2 * j] in its lower half, sc[2 * j + 1] in the upper
    12 .. 75  qs      codes q of 2 bits: 32 bytes hold 128, the lowest bits first

The value of weight i = 0 .. 15 in sub-block j = 0 .. 15:

    d * (sc[j] - 8) * level[q[16 * j + i]]

Source: block_iq2_k and dequantize_row_iq2_k of ik_llama.cpp 8337e4c.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from gguf_tools.ggml_types import IQ2_K
from quantize.formats.base import Bytes, Floats32, decode_blocks
from quantize.formats.blocks_of_32.scales import float_at
from quantize.formats.ik.levels import LEVELS_2, SUPER_ELEMS
from quantize.simd.kernel import kernel

BLOCK = np.dtype([("d", "<u2"), ("extra", "<u2"), ("scales", "u1", 8), ("qs", "u1", 64)])


def decode(data: Bytes, n_cols: int) -> Floats32:
    """Return the weights of rows of IQ2_K."""
    return decode_blocks(data, n_cols, IQ2_K, _decode)


_BYTES = BLOCK.itemsize


@kernel
def _decode(data: npt.NDArray[np.uint8], out: npt.NDArray[np.float32]) -> None:
    for k in range(data.size // _BYTES):
        block = data[k * _BYTES : (k + 1) * _BYTES]
        d = float_at(block, 0)
        for j in range(16):
            second = block[2 + j // 8] >> j % 8 & 1
            scale = d * np.float32((block[4 + j // 2] >> 4 * (j % 2) & 0xF) - 8)
            codes = block[12 + 32 * (j // 8) + 16 * (j % 2) :]
            weights = out[k * SUPER_ELEMS + 16 * j :]
            for i in range(16):
                weights[i] = scale * LEVELS_2[4 * second + (codes[i] >> 2 * (j // 2 % 4) & 3)]
