"""IQ3_KT: 256 weights in 100 bytes, 3.125 bits each, magnitudes on a trellis, with a scale for the row.

A row starts with d, float32. Then come its blocks. An index of 16 bits is for a group of 8 weights.

    bytes     field
    0 .. 3    scales  s: byte j holds that of sub-block j in its lower half, that of j + 4 in the upper
    4 .. 67   ql      the 32 indices
    68 .. 99  qh      signs: bit j of byte i is set if weight 32 * j + i is negative

The magnitudes of a group are d * s times those of the eight levels of `trellis` from its index on.

Source: block_iq3_kt and dequantize_row_iq3_kt of ik_llama.cpp 8337e4c.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from gguf_tools.format.ggml_types import IQ3_KT
from quantize.formats.base import Bytes, Floats32, block_dtype
from quantize.formats.ik.rows import SUPER_ELEMS
from quantize.formats.ik.trellis.encoding import Choices, trellis_format
from quantize.formats.ik.trellis.rows import Task, Trellis, rows_of
from quantize.formats.ik.trellis.trellis import START, level, step
from quantize.simd.kernel import kernel

BLOCK = block_dtype(IQ3_KT)
_BYTES = BLOCK.itemsize
_GROUP = 8
_TRELLIS = Trellis(
    type=IQ3_KT,
    bits=16,
    dim=_GROUP,
    levels=np.arange(16, dtype=np.float32),
    goal=0.025,
    reach=14,
    trials=((1.0, 0), (1.1, 0), (0.9, 0), (1.2, 0), (0.8, 0)),
    kept_nodes=32,
    kept_leaves=3,
    magnitudes=True,
)
_encode_rows = rows_of(_TRELLIS)


@kernel
def _search(task: Task) -> None:
    _encode_rows(task)


def _pack(choices: Choices, weights: Floats32, out: Bytes) -> None:
    blocks = out.view(BLOCK)[:, 0]
    blocks["scales"] = choices.codes[:, :4] | choices.codes[:, 4:] << 4
    blocks["ql"] = choices.indices
    signs = (weights < 0).reshape(-1, 8, 32)
    blocks["qh"] = np.packbits(signs, axis=1, bitorder="little")[:, 0]


@kernel
def _decode(
    data: npt.NDArray[np.uint8], scales: npt.NDArray[np.float32], out: npt.NDArray[np.float32]
) -> None:
    for row in range(len(out)):
        for k in range(out.shape[1] // SUPER_ELEMS):
            block = data[row, k * _BYTES : (k + 1) * _BYTES]
            for g in range(32):
                scale = scales[row] * np.float32(block[g // 4 % 4] >> 4 * (g // 16) & 0xF)
                number = np.uint32((block[4 + 2 * g] | block[5 + 2 * g] << 8) + START)
                signs = block[68 + _GROUP * (g % 4) :]
                weights = out[row, k * SUPER_ELEMS + _GROUP * g :]
                for i in range(_GROUP):
                    number = step(number)
                    weight = scale * abs(level(number))
                    weights[i] = -weight if signs[i] >> g // 4 & 1 else weight


FORMAT = trellis_format(_TRELLIS, _search, _pack, _decode)
