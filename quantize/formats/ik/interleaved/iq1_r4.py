"""IQ1_S_R4 and IQ1_M_R4: points of the grid IQ1, four rows at a time."""

from __future__ import annotations

import numpy as np

from gguf_tools.format.ggml_types import IQ1_M_R4, IQ1_S_R4
from quantize.formats.base import Bytes, Floats32
from quantize.formats.ik.rows import group_decoder
from quantize.formats.iq.iq1_search import decode_group, point_values
from quantize.simd.floats import float_at
from quantize.simd.kernel import kernel

_ROWS, _ELEMS = 4, 32
_META = 2 * _ROWS

# ---- IQ1_S_R4

_IQ1_S_R4_BYTES = _ROWS * IQ1_S_R4.block_bytes


@kernel
def _decode_iq1_s_r4(data: Bytes, values: Floats32, rows: Floats32) -> None:
    """Decode IQ1_S_R4: weights of 1.5 bits of four rows at a time, 32 of each to a block of 24 bytes.

    A group starts with the d of its rows, float16. Then come its blocks:

        bytes       field
        0 .. 15     qs  the lower 8 bits of indices, points of the grid IQ1: byte 4 * g + k is of group g of 8
                        weights in row k
        16 .. 23    qh  16 bits for each row:
                        bits 0 .. 11   the upper 3 bits of its four indices
                        bits 12 .. 14  its scale sc
                        bit 15         its shift: 1/8 if clear, -1/8 if set

    The value of a weight, where v is -1, 0 or 1 by the grid point:

        d * (2 * sc + 1) * (v + shift)

    It is no regrouping of IQ1_S, which has a d for 256 weights.

    Source: block_iq1_s_r4 and dequantize_row_iq1_s_r4 of ik_llama.cpp 8337e4c.
    """
    for row in range(len(rows)):
        group, k = data[row // _ROWS], row % _ROWS
        d = float_at(group, 2 * k)
        for j in range(rows.shape[1] // _ELEMS):
            block = group[_META + j * _IQ1_S_R4_BYTES :]
            upper = block[16 + 2 * k] | block[17 + 2 * k] << 8
            scale = d * np.float32(2 * (upper >> 12 & 7) + 1)
            for g in range(4):
                index = block[4 * g + k] | (upper >> 3 * g & 7) << 8
                decode_group(values, index, upper >> 15, scale, rows[row], j * _ELEMS + 8 * g)


# ---- IQ1_M_R4

_IQ1_M_R4_BYTES = _ROWS * IQ1_M_R4.block_bytes


@kernel
def _decode_iq1_m_r4(data: Bytes, values: Floats32, rows: Floats32) -> None:
    """Decode IQ1_M_R4: weights of 1.75 bits of four rows at a time, 32 of each to a block of 28 bytes.

    A group starts with the d of its rows, float16. Then come its blocks:

        bytes       field
        0 .. 15     qs      the lower 8 bits of indices, points of the grid IQ1: byte 4 * g + k is of group g
                            of 8 weights in row k
        16 .. 23    qh      byte 4 * h + k is of groups 2 * h (lower half) and 2 * h + 1 (upper half) in
                            row k: the upper 3 bits of the index, then the shift: 1/8 if clear, -1/8 if set
        24 .. 27    scales  byte k has the scale sc of groups 0 and 1 in row k in its lower half, that of
                            groups 2 and 3 in the upper

    The value of a weight, where v is -1, 0 or 1 by the grid point:

        d * sc * (v + shift)

    It is no regrouping of IQ1_M, which has a d for 256 weights.

    Source: block_iq1_m_r4 and dequantize_row_iq1_m_r4 of ik_llama.cpp 8337e4c.
    """
    for row in range(len(rows)):
        group, k = data[row // _ROWS], row % _ROWS
        d = float_at(group, 2 * k)
        for j in range(rows.shape[1] // _ELEMS):
            block = group[_META + j * _IQ1_M_R4_BYTES :]
            for g in range(4):
                upper = block[16 + 4 * (g // 2) + k] >> 4 * (g % 2)
                scale = d * np.float32(block[24 + k] >> 4 * (g // 2) & 0xF)
                index = block[4 * g + k] | (upper & 7) << 8
                decode_group(values, index, upper >> 3 & 1, scale, rows[row], j * _ELEMS + 8 * g)


DECODERS = {
    "IQ1_S_R4": group_decoder(IQ1_S_R4, _decode_iq1_s_r4, point_values),
    "IQ1_M_R4": group_decoder(IQ1_M_R4, _decode_iq1_m_r4, point_values),
}
