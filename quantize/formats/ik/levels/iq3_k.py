"""IQ3_K: 256 weights in 110 bytes, 3.4375 bits each, on eight levels out of two sets.

    bytes      field
    0 .. 1     d         float16
    2 .. 3     extra     bit j is set if sub-block j uses the second set of LEVELS_3
    4 .. 5     scales_h  bit j is set if the scale of sub-block j is negative
    6 .. 13    scales_l  magnitudes sc of 4 bits: byte j holds sc[2 * j] in its lower half, sc[2 * j + 1] in
                         the upper
    14 .. 77   qs        bits 0 .. 1 of the codes q: 32 bytes hold 128, the lowest bits first
    78 .. 109  qh        bit 2 of the codes: bit j of byte i is that of weight 32 * j + i

The value of weight i = 0 .. 15 in sub-block j = 0 .. 15:

    d * (2 * sc[j] + 1) * sign[j] * level[q[16 * j + i]]

Source: block_iq3_k and dequantize_row_iq3_k of ik_llama.cpp 8337e4c.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from gguf_tools.format.ggml_types import IQ3_K
from quantize.formats.base import Bytes, Floats32, Rows
from quantize.formats.ik.levels.levels import LEVELS_3, level_coding
from quantize.formats.ik.levels.scale_search import Integers, ScaleTrials, block_quantizer, in_order
from quantize.formats.ik.rows import SUPER_ELEMS, ik_format
from quantize.simd.floats import float_at
from quantize.simd.kernel import inlinable, kernel
from quantize.simd.lane_memory import IntTile, tail
from quantize.simd.lanes import Ints, maximum, select, splat
from quantize.simd.packing import pack, prepend_half

_BYTES = IQ3_K.block_bytes


@kernel
def _decode(data: npt.NDArray[np.uint8], out: npt.NDArray[np.float32]) -> None:
    for k in range(data.size // _BYTES):
        block = data[k * _BYTES : (k + 1) * _BYTES]
        d = float_at(block, 0)
        for j in range(16):
            second = block[2 + j // 8] >> j % 8 & 1
            magnitude = 2 * (block[6 + j // 2] >> 4 * (j % 2) & 0xF) + 1
            scale = d * np.float32(-magnitude if block[4 + j // 8] >> j % 8 & 1 else magnitude)
            lower = block[14 + 32 * (j // 8) + 16 * (j % 2) :]
            upper = block[78 + 16 * (j % 2) :]
            weights = out[k * SUPER_ELEMS + 16 * j :]
            for i in range(16):
                code = lower[i] >> 2 * (j // 2 % 4) & 3 | (upper[i] >> j // 2 & 1) << 2
                weights[i] = scale * LEVELS_3[8 * second + code]


_CODING = level_coding(LEVELS_3, 16)
_SEARCH = ScaleTrials(
    size=16,
    sets=2,
    integers=Integers(-31, 31, 2),
    reach=63,
    factors=np.geomspace(0.62, 1.65, 12).astype(np.float32),
    spreads=np.array([1.0, 1.1], np.float32),
    signs=1,
    has_half=True,
)


@inlinable
def _pack_block(half_d: Ints, codes: IntTile, integers: IntTile, seconds: IntTile, words: IntTile) -> None:
    signs = splat(0)
    for j in range(16):
        signs |= select(integers[j] < 0, splat(1), 0) << j
        integers[j] = maximum(integers[j], -integers[j]) >> 1
    words[0] = in_order(seconds, 0, 16, 0, 1) | signs << 16
    words[1] = in_order(integers, 0, 8, 0, 4)
    words[2] = in_order(integers, 8, 8, 0, 4)
    pack(codes, 0, 2, 32, 64, tail(words, 3))
    pack(codes, 2, 1, 32, 32, tail(words, 19))
    prepend_half(half_d, words, 27)


_quantize_blocks = block_quantizer(_SEARCH, _CODING, IQ3_K, _pack_block)


@kernel
def _quantize(source: Rows, importances: Floats32, out: Bytes) -> int:
    return _quantize_blocks(source, importances, out)


FORMAT = ik_format(IQ3_K, _SEARCH.size, _quantize, _decode)
