"""IQ2_KS: 256 weights in 70 bytes, 2.1875 bits each, on four levels out of two sets, a scale for the row.

A row starts with d, float16. Then come its blocks:

    bytes    field
    0 .. 1   extra   bit j is set if sub-block j uses the second set of LEVELS_2; bit 8 + j is bit 4 of the
                     scale sc[j]
    2 .. 5   scales  bits 0 .. 3: byte j holds sc[2 * j] in its lower half, sc[2 * j + 1] in the upper
    6 .. 69  qs      codes q of 2 bits: 32 bytes hold 128, the lowest bits first

The value of weight i = 0 .. 31 in sub-block j = 0 .. 7:

    d * (sc[j] - 16) * level[q[32 * j + i]]

Source: block_iq2_ks and dequantize_row_iq2_ks of ik_llama.cpp 8337e4c.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from gguf_tools.format.ggml_types import IQ2_KS
from quantize.formats.base import Bytes, Floats32, Rows
from quantize.formats.ik.levels.levels import LEVELS_2, level_coding
from quantize.formats.ik.levels.scale_search import Integers, ScaleTrials, in_order, row_quantizer
from quantize.formats.ik.rows import SUPER_ELEMS, ik_format
from quantize.simd.kernel import inlinable, kernel
from quantize.simd.lane_memory import IntTile, tail
from quantize.simd.packing import pack, prepend_half

_BYTES = IQ2_KS.block_bytes


@kernel
def _decode(
    data: npt.NDArray[np.uint8], scales: npt.NDArray[np.float32], out: npt.NDArray[np.float32]
) -> None:
    for row in range(len(out)):
        for k in range(out.shape[1] // SUPER_ELEMS):
            block = data[row, k * _BYTES : (k + 1) * _BYTES]
            for j in range(8):
                second = block[0] >> j & 1
                code = block[2 + j // 2] >> 4 * (j % 2) & 0xF | (block[1] >> j & 1) << 4
                scale = scales[row] * np.float32(code - 16)
                codes = block[6 + 32 * (j // 4) :]
                weights = out[row, k * SUPER_ELEMS + 32 * j :]
                for i in range(32):
                    weights[i] = scale * LEVELS_2[4 * second + (codes[i] >> 2 * (j % 4) & 3)]


_CODING = level_coding(LEVELS_2, 32)
_SEARCH = ScaleTrials(
    size=32,
    sets=2,
    integers=Integers(-16, 15, 1),
    reach=31,
    factors=np.geomspace(0.45, 1.4, 10).astype(np.float32),
    spreads=np.array([1.0], np.float32),
    signs=1,
    has_half=True,
)


@inlinable
def _pack_block(codes: IntTile, integers: IntTile, seconds: IntTile, words: IntTile) -> None:
    for j in range(8):
        integers[j] = integers[j] + 16
    words[0] = in_order(integers, 0, 8, 0, 4)
    pack(codes, 0, 2, 32, 64, tail(words, 1))
    prepend_half(in_order(seconds, 0, 8, 0, 1) | in_order(integers, 0, 8, 4, 1) << 8, words, 17)


_quantize_rows = row_quantizer(_SEARCH, _CODING, IQ2_KS, _pack_block)


@kernel
def _quantize(source: Rows, importances: Floats32, scales: Floats32, out: Bytes) -> int:
    return _quantize_rows(source, importances, scales, out)


FORMAT = ik_format(IQ2_KS, _SEARCH.size, _quantize, _decode)
