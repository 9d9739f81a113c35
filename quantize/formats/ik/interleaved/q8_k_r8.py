"""Q8_K_R8: weights of 8 bits of eight rows at a time, 256 of each to a block of 2064 bytes.

    bytes        field
    0 .. 15      d   float16, of each row
    16 .. 2063   qs  codes q, int8: four of each row in turn

weight[i] = d * q[i]

It is no regrouping of Q8_K, whose scales are float32.

Source: block_q8_k_r8 and dequantize_row_q8_k_r8 of ik_llama.cpp 8337e4c.
"""

from __future__ import annotations

import numpy as np

from gguf_tools.format.ggml_types import Q8_K_R8
from quantize.formats.base import Bytes, Floats32, check_data

BLOCK = np.dtype([("d", "<f2", 8), ("qs", "i1", (64, 8, 4))])
"""Of a group."""


def decode(data: Bytes, n_cols: int) -> Floats32:
    """Return the weights of rows of Q8_K_R8."""
    check_data(data, n_cols, Q8_K_R8)
    n_blocks = n_cols // Q8_K_R8.block_elems
    blocks = np.ascontiguousarray(data).reshape(-1).view(BLOCK).reshape(-1, n_blocks)
    codes = blocks["qs"].transpose(0, 3, 1, 2, 4).astype(np.float32)  # (group, row, block, run, code)
    scales = blocks["d"].transpose(0, 2, 1).astype(np.float32)
    with np.errstate(all="ignore"):
        rows: Floats32 = codes * scales[:, :, :, np.newaxis, np.newaxis]
    return np.ascontiguousarray(rows).reshape(len(data), n_cols)
