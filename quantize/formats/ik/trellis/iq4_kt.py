"""IQ4_KT: 256 weights in 128 bytes, 4 bits each, on a trellis, with a scale for the row.

A row starts with d, float32. Then come its blocks. An index of 15 bits is for a group of 4 weights.

    bytes      field
    0 .. 31    shb  32 bits for each sub-block:
                    bit 0         what is added to its indices: 4096 if clear, 36864 if set
                    bits 1 .. 7   its scale s
                    bits 8 .. 31  bits 12 .. 14 of its eight indices
    32 .. 95   ql   bits 0 .. 7 of the 64 indices
    96 .. 127  qh   bits 8 .. 11: byte g holds those of index g in its lower half, of g + 32 in the upper

The weights of a group are d * (s - 64) times the four levels of `trellis` from its index on.

Source: block_iq4_kt and dequantize_row_iq4_kt of ik_llama.cpp 8337e4c.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from gguf_tools.format.ggml_types import IQ4_KT
from quantize.formats.base import Bytes, Floats32, block_dtype
from quantize.formats.ik.rows import SUPER_ELEMS
from quantize.formats.ik.trellis.encoding import Choices, trellis_format
from quantize.formats.ik.trellis.rows import Task, Trellis, rows_of
from quantize.formats.ik.trellis.trellis import START, walk
from quantize.simd.kernel import kernel

BLOCK = block_dtype(IQ4_KT)
_BYTES = BLOCK.itemsize
_GROUP = 4
_SECOND_START = 1 << 15
_TRELLIS = Trellis(
    type=IQ4_KT,
    bits=15,
    dim=_GROUP,
    levels=np.arange(-64, 64, dtype=np.float32),
    goal=0.0235,
    reach=60,
    trials=tuple(
        (sign * factor, start)
        for factor in (1.0, 1.12, 0.88, 1.06, 0.94)
        for start in (0, 1)
        for sign in (1, -1)
    ),
    kept_nodes=8,
    kept_leaves=1,
    starts=(START, START + _SECOND_START),
    ends_again=True,
)
_encode_rows = rows_of(_TRELLIS)


@kernel
def _search(task: Task) -> None:
    _encode_rows(task)


def _pack(choices: Choices, _weights: Floats32, out: Bytes) -> None:
    blocks, indices = out.view(BLOCK)[:, 0], choices.indices
    top = (indices >> 12).reshape(-1, 8, 8) << np.arange(8, 32, 3)
    blocks["shb"] = choices.starts | choices.codes << 1 | top.sum(axis=2)
    blocks["ql"] = indices & 0xFF
    upper = indices >> 8 & 0xF
    blocks["qh"] = upper[:, :32] | upper[:, 32:] << 4


@kernel
def _decode(
    data: npt.NDArray[np.uint8], scales: npt.NDArray[np.float32], out: npt.NDArray[np.float32]
) -> None:
    for row in range(len(out)):
        for k in range(out.shape[1] // SUPER_ELEMS):
            block = data[row, k * _BYTES : (k + 1) * _BYTES]
            for j in range(8):
                code = block[4 * j]
                top = block[4 * j + 1] | block[4 * j + 2] << 8 | block[4 * j + 3] << 16
                scale = scales[row] * np.float32((code >> 1) - 64)
                start = START + (code & 1) * _SECOND_START
                for g in range(8 * j, 8 * j + 8):
                    index = block[32 + g] | (block[96 + g % 32] >> 4 * (g // 32) & 0xF) << 8
                    index |= (top >> 3 * (g - 8 * j) & 7) << 12
                    walk(index + start, scale, out[row, k * SUPER_ELEMS + _GROUP * g :], _GROUP)


FORMAT = trellis_format(_TRELLIS, _search, _pack, _decode)
