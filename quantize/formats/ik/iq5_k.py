"""IQ5_K: 256 weights in 176 bytes, 5.5 bits each, on thirty-two levels out of two sets.

    bytes       field
    0 .. 1      d         float16
    2 .. 3      extra     bit j is set if sub-block j uses the second set of LEVELS_5
    4 .. 7      scales_h  bits 4 .. 5 of the scales sc: byte j has those of sc[4 * j] .. sc[4 * j + 3], lowest
                          bits first
    8 .. 15     scales_l  bits 0 .. 3: byte j holds sc[2 * j] in its lower half, sc[2 * j + 1] in the upper
    16 .. 143   qs        bits 0 .. 3 of the codes q: 32 bytes hold 64, the lower halves first
    144 .. 175  qh        bit 4 of the codes: bit j of byte i is that of weight 32 * j + i

The value of weight i = 0 .. 15 in sub-block j = 0 .. 15:

    d * (sc[j] - 32) * level[q[16 * j + i]]

Source: block_iq5_k and dequantize_row_iq5_k of ik_llama.cpp 8337e4c.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from gguf_tools.ggml_types import IQ5_K
from quantize.formats.base import Bytes, Floats32, decode_blocks
from quantize.formats.blocks_of_32.scales import float_at
from quantize.formats.ik.levels import LEVELS_5, SUPER_ELEMS
from quantize.simd.kernel import kernel

BLOCK = np.dtype(
    [
        ("d", "<u2"),
        ("extra", "<u2"),
        ("scales_h", "u1", 4),
        ("scales_l", "u1", 8),
        ("qs", "u1", 128),
        ("qh", "u1", 32),
    ]
)


def decode(data: Bytes, n_cols: int) -> Floats32:
    """Return the weights of rows of IQ5_K."""
    return decode_blocks(data, n_cols, IQ5_K, _decode)


_BYTES = BLOCK.itemsize


@kernel
def _decode(data: npt.NDArray[np.uint8], out: npt.NDArray[np.float32]) -> None:
    for k in range(data.size // _BYTES):
        block = data[k * _BYTES : (k + 1) * _BYTES]
        d = float_at(block, 0)
        for j in range(16):
            second = block[2 + j // 8] >> j % 8 & 1
            high_bits = block[4 + j // 4] >> 2 * (j % 4) & 3
            scale = d * np.float32((block[8 + j // 2] >> 4 * (j % 2) & 0xF | high_bits << 4) - 32)
            lower = block[16 + 32 * (j // 4) + 16 * (j % 2) :]
            upper = block[144 + 16 * (j % 2) :]
            weights = out[k * SUPER_ELEMS + 16 * j :]
            for i in range(16):
                code = lower[i] >> 4 * (j // 2 % 2) & 0xF | (upper[i] >> j // 2 & 1) << 4
                weights[i] = scale * LEVELS_5[32 * second + code]
