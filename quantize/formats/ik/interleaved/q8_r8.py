"""Q8_K_R8 and Q8_KV_R8: weights of 8 bits, eight rows at a time."""

from __future__ import annotations

import numpy as np

from gguf_tools.format.ggml_types import Q8_K_R8, Q8_KV, Q8_KV_R8
from quantize.formats.base import Bytes, Floats32, check_data
from quantize.formats.ik.rows import as_groups

# ---- Q8_K_R8

_Q8_K_R8_BLOCK = np.dtype([("d", "<f2", 8), ("qs", "i1", (64, 8, 4))])
"""Of a group."""


def _decode_q8_k_r8(data: Bytes, n_cols: int) -> Floats32:
    """Decode Q8_K_R8: 256 weights of 8 bits of each of eight rows in 2064 bytes.

        bytes        field
        0 .. 15      d   float16, of each row
        16 .. 2063   qs  codes q, int8: four of each row in turn

    weight[i] = d * q[i]

    It is no regrouping of Q8_K, whose scales are float32.

    Source: block_q8_k_r8 and dequantize_row_q8_k_r8 of ik_llama.cpp 8337e4c.
    """
    check_data(data, n_cols, Q8_K_R8)
    n_blocks = n_cols // Q8_K_R8.block_elems
    blocks = np.ascontiguousarray(data).reshape(-1).view(_Q8_K_R8_BLOCK).reshape(-1, n_blocks)
    codes = blocks["qs"].transpose(0, 3, 1, 2, 4).astype(np.float32)  # (group, row, block, run, code)
    scales = blocks["d"].transpose(0, 2, 1).astype(np.float32)
    with np.errstate(all="ignore"):
        rows: Floats32 = codes * scales[:, :, :, np.newaxis, np.newaxis]
    return np.ascontiguousarray(rows).reshape(len(data), n_cols)


# ---- Q8_KV_R8

_ROWS = Q8_KV_R8.rows_interleaved


def _decode_q8_kv_r8(data: Bytes, n_cols: int) -> Floats32:
    """Decode Q8_KV_R8: weights of 8 bits of eight rows, with a scale for each row.

    A group starts with the d of its rows, float32. Then come codes q, int8: four of each row in turn.

    weight[i] = d * q[i]

    Q8_KV's rows have the same numbers, and the sum of their codes besides.

    Source: repack_q8_KV and dequantize_row_q8_KV_r8 of ik_llama.cpp 8337e4c.
    """
    check_data(data, n_cols, Q8_KV_R8)
    groups = as_groups(data, Q8_KV_R8)
    scales = np.ascontiguousarray(groups[:, : 4 * _ROWS]).view("<f4").astype(np.float32)
    codes = groups[:, 4 * _ROWS :].view(np.int8).reshape(len(groups), n_cols // 4, _ROWS, 4)
    with np.errstate(all="ignore"):
        rows: Floats32 = codes.transpose(0, 2, 1, 3).astype(np.float32) * scales[:, :, np.newaxis, np.newaxis]
    return np.ascontiguousarray(rows).reshape(len(data), n_cols)


def to_base(data: Bytes, n_cols: int) -> Bytes:
    """Return rows of Q8_KV_R8 as rows of Q8_KV, uint8 (n_rows, row bytes)."""
    check_data(data, n_cols, Q8_KV_R8)
    groups = as_groups(data, Q8_KV_R8)
    codes = groups[:, 4 * _ROWS :].reshape(len(groups), n_cols // 4, _ROWS, 4).transpose(0, 2, 1, 3)
    rows = np.empty((len(data), Q8_KV.row_bytes(n_cols)), np.uint8)
    rows[:, :4] = groups[:, : 4 * _ROWS].reshape(len(data), 4)
    rows[:, 8:] = codes.reshape(len(data), n_cols)
    sums = rows[:, 8:].view(np.int8).sum(axis=1, dtype=np.int64).astype("<i4")
    rows[:, 4:8] = sums.view(np.uint8).reshape(len(data), 4)
    return rows


def from_base(data: Bytes, n_cols: int) -> Bytes:
    """Return rows of Q8_KV as rows of Q8_KV_R8, uint8 (n_rows, row bytes)."""
    check_data(data, n_cols, Q8_KV)
    out = np.empty((len(data), Q8_KV_R8.row_bytes(n_cols)), np.uint8)
    check_data(out, n_cols, Q8_KV_R8)
    groups = out.reshape(-1, _ROWS * out.shape[1])
    groups[:, : 4 * _ROWS] = data[:, :4].reshape(-1, 4 * _ROWS)
    codes = data[:, 8:].reshape(-1, _ROWS, n_cols // 4, 4).transpose(0, 2, 1, 3)
    groups[:, 4 * _ROWS :] = codes.reshape(len(groups), _ROWS * n_cols)
    return out


DECODERS = {"Q8_K_R8": _decode_q8_k_r8, "Q8_KV_R8": _decode_q8_kv_r8}
