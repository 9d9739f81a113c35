"""Q8_KV_R8: weights of 8 bits of eight rows at a time, with a scale for each row.

A group starts with the d of its rows, float32. Then come codes q, int8: four of each row in turn.

weight[i] = d * q[i]

Q8_KV's rows have the same numbers, and the sum of their codes besides.

Source: repack_q8_KV and dequantize_row_q8_KV_r8 of ik_llama.cpp 8337e4c.
"""

from __future__ import annotations

import numpy as np

from gguf_tools.ggml_types import Q8_KV_R8
from quantize.formats.base import Bytes, Floats32, check_data
from quantize.formats.ik.levels import as_groups

_ROWS = Q8_KV_R8.rows_interleaved


def decode(data: Bytes, n_cols: int) -> Floats32:
    """Return the weights of rows of Q8_KV_R8."""
    check_data(data, n_cols, Q8_KV_R8)
    groups = as_groups(data, Q8_KV_R8)
    scales = np.ascontiguousarray(groups[:, : 4 * _ROWS]).view("<f4").astype(np.float32)
    codes = groups[:, 4 * _ROWS :].view(np.int8).reshape(len(groups), n_cols // 4, _ROWS, 4)
    with np.errstate(all="ignore"):
        rows: Floats32 = codes.transpose(0, 2, 1, 3).astype(np.float32) * scales[:, :, np.newaxis, np.newaxis]
    return np.ascontiguousarray(rows).reshape(len(data), n_cols)
