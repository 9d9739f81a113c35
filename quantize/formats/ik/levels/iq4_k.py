"""IQ4_K: 256 weights in 144 bytes, 4.5 bits each, on sixteen levels out of two sets.

    bytes      field
    0 .. 1     d         float16
    2 .. 3     extra     bit j is set if sub-block j uses the second set of LEVELS_4
    4 .. 7     scales_h  bits 4 .. 5 of the scales sc: byte j has those of sc[4 * j] .. sc[4 * j + 3], lowest
                         bits first
    8 .. 15    scales_l  bits 0 .. 3: byte j holds sc[2 * j] in its lower half, sc[2 * j + 1] in the upper
    16 .. 143  qs        codes q of 4 bits: 16 bytes hold 32, the lower halves first

The value of weight i = 0 .. 15 in sub-block j = 0 .. 15:

    d * (sc[j] - 32) * level[q[16 * j + i]]

Source: block_iq4_k and dequantize_row_iq4_k of ik_llama.cpp 8337e4c.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from gguf_tools.format.ggml_types import IQ4_K
from quantize.formats.base import Bytes, Floats32, Rows
from quantize.formats.ik.levels.levels import LEVELS_4, level_coding
from quantize.formats.ik.levels.scale_search import Integers, ScaleTrials, block_quantizer, in_order
from quantize.formats.ik.rows import SUPER_ELEMS, ik_format
from quantize.simd.floats import float_at
from quantize.simd.kernel import inlinable, kernel
from quantize.simd.lane_memory import IntTile, tail
from quantize.simd.lanes import Ints
from quantize.simd.packing import pack

_BYTES = IQ4_K.block_bytes


@kernel
def _decode(data: npt.NDArray[np.uint8], out: npt.NDArray[np.float32]) -> None:
    for k in range(data.size // _BYTES):
        block = data[k * _BYTES : (k + 1) * _BYTES]
        d = float_at(block, 0)
        for j in range(16):
            second = block[2 + j // 8] >> j % 8 & 1
            upper = block[4 + j // 4] >> 2 * (j % 4) & 3
            scale = d * np.float32((block[8 + j // 2] >> 4 * (j % 2) & 0xF | upper << 4) - 32)
            codes = block[16 + 16 * (j // 2) :]
            weights = out[k * SUPER_ELEMS + 16 * j :]
            for i in range(16):
                weights[i] = scale * LEVELS_4[16 * second + (codes[i] >> 4 * (j % 2) & 0xF)]


_CODING = level_coding(LEVELS_4, 16)
_SEARCH = ScaleTrials(
    size=16,
    sets=2,
    integers=Integers(-32, 31, 1),
    reach=127,
    factors=np.geomspace(0.83, 1.6, 14).astype(np.float32),
    spreads=np.array([1.05, 1.16], np.float32),
    signs=1,
    has_half=True,
)


@inlinable
def _pack_block(half_d: Ints, codes: IntTile, integers: IntTile, seconds: IntTile, words: IntTile) -> None:
    for j in range(16):
        integers[j] = integers[j] + 32
    words[0] = half_d | in_order(seconds, 0, 16, 0, 1) << 16
    words[1] = in_order(integers, 0, 16, 4, 2)
    words[2] = in_order(integers, 0, 8, 0, 4)
    words[3] = in_order(integers, 8, 8, 0, 4)
    pack(codes, 0, 4, 16, 128, tail(words, 4))


_quantize_blocks = block_quantizer(_SEARCH, _CODING, IQ4_K, _pack_block)


@kernel
def _quantize(source: Rows, importances: Floats32, out: Bytes) -> int:
    return _quantize_blocks(source, importances, out)


FORMAT = ik_format(IQ4_K, _SEARCH.size, _quantize, _decode)
