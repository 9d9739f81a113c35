"""IQ5_K: 256 weights in 176 bytes, 5.5 bits each, on thirty-two levels out of two sets.

    bytes       field
    0 .. 1      d         float16
    2 .. 3      extra     bit j is set if sub-block j uses the second set of LEVELS_5
    4 .. 7      scales_h  bits 4 .. 5 of the scales sc: byte j has those of sc[4 * j] .. sc[4 * j + 3], lowest
                          bits first
    8 .. 15     scales_l  bits 0 .. 3: byte j holds sc[2 * j] in its lower half, sc[2 * j + 1] in the upper
    16 .. 143   qs        bits 0 .. 3 of the codes q: 32 bytes hold 64, the lower halves first
    144 .. 175  qh        bit 4 of the codes: bit j of byte i is that of weight 32 * j + i

The value of weight i = 0 .. 15 in sub-block j = 0 .. 15:

    d * (sc[j] - 32) * level[q[16 * j + i]]

Source: block_iq5_k and dequantize_row_iq5_k of ik_llama.cpp 8337e4c.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from gguf_tools.format.ggml_types import IQ5_K
from quantize.formats.base import Bytes, Floats32, Rows
from quantize.formats.ik.levels.levels import LEVELS_5, level_coding
from quantize.formats.ik.levels.scale_search import Integers, ScaleTrials, block_quantizer, in_order
from quantize.formats.ik.rows import SUPER_ELEMS, ik_format
from quantize.simd.floats import float_at
from quantize.simd.kernel import inlinable, kernel
from quantize.simd.lane_memory import IntTile, tail
from quantize.simd.lanes import Ints
from quantize.simd.packing import pack

_BYTES = IQ5_K.block_bytes


@kernel
def _decode(data: npt.NDArray[np.uint8], out: npt.NDArray[np.float32]) -> None:
    for k in range(data.size // _BYTES):
        block = data[k * _BYTES : (k + 1) * _BYTES]
        d = float_at(block, 0)
        for j in range(16):
            second = block[2 + j // 8] >> j % 8 & 1
            high_bits = block[4 + j // 4] >> 2 * (j % 4) & 3
            scale = d * np.float32((block[8 + j // 2] >> 4 * (j % 2) & 0xF | high_bits << 4) - 32)
            lower = block[16 + 32 * (j // 4) + 16 * (j % 2) :]
            upper = block[144 + 16 * (j % 2) :]
            weights = out[k * SUPER_ELEMS + 16 * j :]
            for i in range(16):
                code = lower[i] >> 4 * (j // 2 % 2) & 0xF | (upper[i] >> j // 2 & 1) << 4
                weights[i] = scale * LEVELS_5[32 * second + code]


_CODING = level_coding(LEVELS_5, 16)
_SEARCH = ScaleTrials(
    size=16,
    sets=2,
    integers=Integers(-32, 31, 1),
    reach=126,
    factors=np.geomspace(0.9, 1.65, 18).astype(np.float32),
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
    pack(codes, 0, 4, 32, 128, tail(words, 4))
    pack(codes, 4, 1, 32, 32, tail(words, 36))


_quantize_blocks = block_quantizer(_SEARCH, _CODING, IQ5_K, _pack_block)


@kernel
def _quantize(source: Rows, importances: Floats32, out: Bytes) -> int:
    return _quantize_blocks(source, importances, out)


FORMAT = ik_format(IQ5_K, _SEARCH.size, _quantize, _decode)
