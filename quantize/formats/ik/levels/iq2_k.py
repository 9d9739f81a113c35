"""IQ2_K: 256 weights in 76 bytes, 2.375 bits each, on four levels out of two sets.

    bytes     field
    0 .. 1    d       float16
    2 .. 3    extra   bit j is set if sub-block j uses the second set of LEVELS_2
    4 .. 11   scales  sc of 4 bits: byte j holds sc[2 * j] in its lower half, sc[2 * j + 1] in the upper
    12 .. 75  qs      codes q of 2 bits: 32 bytes hold 128, the lowest bits first

The value of weight i = 0 .. 15 in sub-block j = 0 .. 15:

    d * (sc[j] - 8) * level[q[16 * j + i]]

Source: block_iq2_k and dequantize_row_iq2_k of ik_llama.cpp 8337e4c.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from gguf_tools.format.ggml_types import IQ2_K
from quantize.formats.base import Bytes, Floats32, Rows
from quantize.formats.ik.levels.levels import LEVELS_2, level_coding
from quantize.formats.ik.levels.scale_search import Integers, ScaleTrials, block_quantizer, in_order
from quantize.formats.ik.rows import SUPER_ELEMS, ik_format
from quantize.simd.floats import float_at
from quantize.simd.kernel import inlinable, kernel
from quantize.simd.lane_memory import IntTile, tail
from quantize.simd.lanes import Ints
from quantize.simd.packing import pack

_BYTES = IQ2_K.block_bytes


@kernel
def _decode(data: npt.NDArray[np.uint8], out: npt.NDArray[np.float32]) -> None:
    for k in range(data.size // _BYTES):
        block = data[k * _BYTES : (k + 1) * _BYTES]
        d = float_at(block, 0)
        for j in range(16):
            second = block[2 + j // 8] >> j % 8 & 1
            scale = d * np.float32((block[4 + j // 2] >> 4 * (j % 2) & 0xF) - 8)
            codes = block[12 + 32 * (j // 8) + 16 * (j % 2) :]
            weights = out[k * SUPER_ELEMS + 16 * j :]
            for i in range(16):
                weights[i] = scale * LEVELS_2[4 * second + (codes[i] >> 2 * (j // 2 % 4) & 3)]


_CODING = level_coding(LEVELS_2, 16)
_SEARCH = ScaleTrials(
    size=16,
    sets=2,
    integers=Integers(-8, 7, 1),
    reach=31,
    factors=np.geomspace(0.44, 1.6, 12).astype(np.float32),
    spreads=np.array([0.93, 1.03], np.float32),
    signs=2,
    has_half=True,
)


@inlinable
def _pack_block(half_d: Ints, codes: IntTile, integers: IntTile, seconds: IntTile, words: IntTile) -> None:
    for j in range(16):
        integers[j] = integers[j] + 8
    words[0] = half_d | in_order(seconds, 0, 16, 0, 1) << 16
    words[1] = in_order(integers, 0, 8, 0, 4)
    words[2] = in_order(integers, 8, 8, 0, 4)
    pack(codes, 0, 2, 32, 64, tail(words, 3))


_quantize_blocks = block_quantizer(_SEARCH, _CODING, IQ2_K, _pack_block)


@kernel
def _quantize(source: Rows, importances: Floats32, out: Bytes) -> int:
    return _quantize_blocks(source, importances, out)


FORMAT = ik_format(IQ2_K, _SEARCH.size, _quantize, _decode)
