"""IQ1_KT: 256 weights in 56 bytes, 1.75 bits each, on a trellis, with a scale for the row.

A row starts with d, float32. Then come its blocks. An index of 13 bits is for a group of 8 weights.

    bytes     field
    0 .. 7    sh  bits 0 .. 3 of byte j choose the scale s of sub-block j: the first set of LEVELS_4; bits
                  4 .. 7 are bit 12 of its four indices
    8 .. 39   ql  bits 0 .. 7 of the 32 indices
    40 .. 55  qh  bits 8 .. 11: byte g holds those of index g in its lower half, of g + 16 in the upper

The weights of a group are d * s times the eight levels of `trellis` from its index on.

Source: block_iq1_kt and dequantize_row_iq1_kt of ik_llama.cpp 8337e4c.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from gguf_tools.format.ggml_types import IQ1_KT
from quantize.formats.base import Bytes, Floats32, block_dtype
from quantize.formats.ik.levels.levels import LEVELS_4
from quantize.formats.ik.rows import SUPER_ELEMS
from quantize.formats.ik.trellis.encoding import Choices, trellis_format
from quantize.formats.ik.trellis.rows import Task, Trellis, rows_of
from quantize.formats.ik.trellis.trellis import START, walk
from quantize.simd.kernel import kernel

BLOCK = block_dtype(IQ1_KT)
_BYTES = BLOCK.itemsize
_GROUP = 8
_TRELLIS = Trellis(
    type=IQ1_KT,
    bits=13,
    dim=_GROUP,
    levels=LEVELS_4[:16],
    goal=0.0205,
    reach=120,
    trials=((1.0, 0), (-1.0, 0), (1.1, 0)),
    kept_nodes=16,
    kept_leaves=2,
)
_encode_rows = rows_of(_TRELLIS)


@kernel
def _search(task: Task) -> None:
    _encode_rows(task)


def _pack(choices: Choices, _weights: Floats32, out: Bytes) -> None:
    blocks, indices = out.view(BLOCK)[:, 0], choices.indices
    top = (indices >> 12).reshape(-1, 8, 4) << np.arange(4, 8)
    blocks["sh"] = choices.codes | top.sum(axis=2)
    blocks["ql"] = indices & 0xFF
    upper = indices >> 8 & 0xF
    blocks["qh"] = upper[:, :16] | upper[:, 16:] << 4


@kernel
def _decode(
    data: npt.NDArray[np.uint8], scales: npt.NDArray[np.float32], out: npt.NDArray[np.float32]
) -> None:
    for row in range(len(out)):
        for k in range(out.shape[1] // SUPER_ELEMS):
            block = data[row, k * _BYTES : (k + 1) * _BYTES]
            for g in range(32):
                own = block[g // 4]
                scale = scales[row] * LEVELS_4[own & 0xF]
                index = block[8 + g] | (block[40 + g % 16] >> 4 * (g // 16) & 0xF) << 8
                index |= (own >> 4 + g % 4 & 1) << 12
                walk(index + START, scale, out[row, k * SUPER_ELEMS + _GROUP * g :], _GROUP)


FORMAT = trellis_format(_TRELLIS, _search, _pack, _decode)
