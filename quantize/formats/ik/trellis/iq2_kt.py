"""IQ2_KT: 256 weights in 68 bytes, 2.125 bits each, on a trellis, with a scale for the row.

A row starts with d, float32. Then come its blocks. An index of 16 bits is for a group of 8 weights.

    bytes    field
    0 .. 3   scales  the lower half of byte j chooses the scale s of sub-block j, the upper that of j + 4: the
                     first set of LEVELS_4
    4 .. 67  ql      the 32 indices

The weights of a group are d * s times the eight levels of `trellis` from its index on.

Source: block_iq2_kt and dequantize_row_iq2_kt of ik_llama.cpp 8337e4c.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from gguf_tools.format.ggml_types import IQ2_KT
from quantize.formats.base import Bytes, Floats32, block_dtype
from quantize.formats.ik.levels.levels import LEVELS_4
from quantize.formats.ik.rows import SUPER_ELEMS
from quantize.formats.ik.trellis.encoding import Choices, trellis_format
from quantize.formats.ik.trellis.rows import Task, Trellis, rows_of
from quantize.formats.ik.trellis.trellis import START, walk
from quantize.simd.kernel import kernel

BLOCK = block_dtype(IQ2_KT)
_BYTES = BLOCK.itemsize
_GROUP = 8
_TRELLIS = Trellis(
    type=IQ2_KT,
    bits=16,
    dim=_GROUP,
    levels=LEVELS_4[:16],
    goal=0.0235,
    reach=120,
    trials=((1.0, 0), (-1.0, 0)),
    kept_nodes=32,
    kept_leaves=3,
)
_encode_rows = rows_of(_TRELLIS)


@kernel
def _search(task: Task) -> None:
    _encode_rows(task)


def _pack(choices: Choices, _weights: Floats32, out: Bytes) -> None:
    blocks = out.view(BLOCK)[:, 0]
    blocks["scales"] = choices.codes[:, :4] | choices.codes[:, 4:] << 4
    blocks["ql"] = choices.indices


@kernel
def _decode(
    data: npt.NDArray[np.uint8], scales: npt.NDArray[np.float32], out: npt.NDArray[np.float32]
) -> None:
    for row in range(len(out)):
        for k in range(out.shape[1] // SUPER_ELEMS):
            block = data[row, k * _BYTES : (k + 1) * _BYTES]
            for g in range(32):
                scale = scales[row] * LEVELS_4[block[g // 4 % 4] >> 4 * (g // 16) & 0xF]
                index = block[4 + 2 * g] | block[5 + 2 * g] << 8
                walk(index + START, scale, out[row, k * SUPER_ELEMS + _GROUP * g :], _GROUP)


FORMAT = trellis_format(_TRELLIS, _search, _pack, _decode)
