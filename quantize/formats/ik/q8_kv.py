"""Q8_KV: weights of 8 bits, 32 to a block, with a scale for the whole row.

A row starts with d, float32, and the sum of its codes, int32. Then come its codes q, int8:

    weight[i] = d * q[i]

Source: iqk_quantize_row_q8_KV and dequantize_row_q8_KV of ik_llama.cpp 8337e4c.
"""

from __future__ import annotations

import numpy as np

from gguf_tools.ggml_types import Q8_KV
from quantize.formats.base import Bytes, Floats32, check_data


def decode(data: Bytes, n_cols: int) -> Floats32:
    """Return the weights of rows of Q8_KV."""
    check_data(data, n_cols, Q8_KV)
    scales = np.ascontiguousarray(data[:, :4]).view("<f4")
    codes = np.ascontiguousarray(data[:, Q8_KV.row_meta_bytes :]).view(np.int8)
    with np.errstate(all="ignore"):
        rows: Floats32 = codes.astype(np.float32) * scales.astype(np.float32)
    return rows
