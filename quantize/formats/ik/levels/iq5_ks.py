"""IQ5_KS: 256 weights in 168 bytes, 5.25 bits each, on 32 levels out of two sets, a scale for the row.

A row starts with d, float32. Then come its blocks:

    bytes       field
    0 .. 7      scales  bits 1 .. 7 of byte j are the scale sc[j]; bit 0 is set if sub-block j uses the second
                        set of LEVELS_5
    8 .. 135    qs      bits 0 .. 3 of the codes q: 32 bytes hold 64, the lower halves first
    136 .. 167  qh      bit 4 of the codes: bit j of byte i is that of weight 32 * j + i

The value of weight i = 0 .. 31 in sub-block j = 0 .. 7:

    d * (2 * sc[j] - 127) * level[q[32 * j + i]]

Source: block_iq5_ks and dequantize_row_iq5_ks of ik_llama.cpp 8337e4c.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from gguf_tools.format.ggml_types import IQ5_KS
from quantize.formats.base import Bytes, Floats32, Rows
from quantize.formats.ik.levels.levels import LEVELS_5, level_coding
from quantize.formats.ik.levels.scale_search import Integers, ScaleTrials, row_quantizer
from quantize.formats.ik.rows import SUPER_ELEMS, ik_format
from quantize.simd.kernel import inlinable, kernel
from quantize.simd.lane_memory import IntTile, tail
from quantize.simd.packing import pack

_BYTES = IQ5_KS.block_bytes


@kernel
def _decode(
    data: npt.NDArray[np.uint8], scales: npt.NDArray[np.float32], out: npt.NDArray[np.float32]
) -> None:
    for row in range(len(out)):
        for k in range(out.shape[1] // SUPER_ELEMS):
            block = data[row, k * _BYTES : (k + 1) * _BYTES]
            upper = block[136:]
            for j in range(8):
                first = 32 * (block[j] & 1)
                scale = scales[row] * np.float32((block[j] & 254) - 127)
                lower = block[8 + 32 * (j // 2) :]
                weights = out[row, k * SUPER_ELEMS + 32 * j :]
                for i in range(32):
                    code = lower[i] >> 4 * (j % 2) & 0xF | (upper[i] >> j & 1) << 4
                    weights[i] = scale * LEVELS_5[first + code]


_CODING = level_coding(LEVELS_5, 32)
_SEARCH = ScaleTrials(
    size=32,
    sets=2,
    integers=Integers(-127, 127, 2),
    reach=126,
    factors=np.geomspace(0.88, 1.4, 16).astype(np.float32),
    spreads=np.array([1.05], np.float32),
    signs=1,
    has_half=False,
)


@inlinable
def _pack_block(codes: IntTile, integers: IntTile, seconds: IntTile, words: IntTile) -> None:
    for j in range(8):
        integers[j] = integers[j] + 127 | seconds[j]
    pack(integers, 0, 8, 8, 8, words)
    pack(codes, 0, 4, 32, 128, tail(words, 2))
    pack(codes, 4, 1, 32, 32, tail(words, 34))


_quantize_rows = row_quantizer(_SEARCH, _CODING, IQ5_KS, _pack_block)


@kernel
def _quantize(source: Rows, importances: Floats32, scales: Floats32, out: Bytes) -> int:
    return _quantize_rows(source, importances, scales, out)


FORMAT = ik_format(IQ5_KS, _SEARCH.size, _quantize, _decode)
