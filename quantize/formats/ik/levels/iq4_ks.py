"""IQ4_KS: 256 weights in 136 bytes, 4.25 bits each, on sixteen levels out of two sets, a scale for the row.

A row starts with d, float32. Then come its blocks:

    bytes     field
    0 .. 7    scales  bits 1 .. 7 of byte j are the scale sc[j]; bit 0 is set if sub-block j uses the second
                      set of LEVELS_4
    8 .. 135  qs      codes q of 4 bits: 16 bytes hold 32, the lower halves first

The value of weight i = 0 .. 31 in sub-block j = 0 .. 7:

    d * (2 * sc[j] - 127) * level[q[32 * j + i]]

Source: block_iq4_ks and dequantize_row_iq4_ks of ik_llama.cpp 8337e4c.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from gguf_tools.format.ggml_types import IQ4_KS
from quantize.formats.base import Bytes, Floats32, Rows
from quantize.formats.ik.levels.levels import LEVELS_4, level_coding
from quantize.formats.ik.levels.scale_search import Integers, ScaleTrials, row_quantizer
from quantize.formats.ik.rows import SUPER_ELEMS, ik_format
from quantize.simd.kernel import inlinable, kernel
from quantize.simd.lane_memory import IntTile, tail
from quantize.simd.packing import pack

_BYTES = IQ4_KS.block_bytes


@kernel
def _decode(
    data: npt.NDArray[np.uint8], scales: npt.NDArray[np.float32], out: npt.NDArray[np.float32]
) -> None:
    for row in range(len(out)):
        for k in range(out.shape[1] // SUPER_ELEMS):
            block = data[row, k * _BYTES : (k + 1) * _BYTES]
            for j in range(8):
                first = 16 * (block[j] & 1)
                scale = scales[row] * np.float32((block[j] & 254) - 127)
                codes = block[8 + 16 * j :]
                weights = out[row, k * SUPER_ELEMS + 32 * j :]
                for i in range(16):
                    weights[i] = scale * LEVELS_4[first + (codes[i] & 0xF)]
                    weights[i + 16] = scale * LEVELS_4[first + (codes[i] >> 4)]


_CODING = level_coding(LEVELS_4, 32)
_SEARCH = ScaleTrials(
    size=32,
    sets=2,
    integers=Integers(-127, 127, 2),
    reach=127,
    factors=np.geomspace(0.75, 1.5, 14).astype(np.float32),
    spreads=np.array([1.05], np.float32),
    signs=1,
    has_half=False,
)


@inlinable
def _pack_block(codes: IntTile, integers: IntTile, seconds: IntTile, words: IntTile) -> None:
    for j in range(8):
        integers[j] = integers[j] + 127 | seconds[j]
    pack(integers, 0, 8, 8, 8, words)
    pack(codes, 0, 4, 16, 128, tail(words, 2))


_quantize_rows = row_quantizer(_SEARCH, _CODING, IQ4_KS, _pack_block)


@kernel
def _quantize(source: Rows, importances: Floats32, scales: Floats32, out: Bytes) -> int:
    return _quantize_rows(source, importances, scales, out)


FORMAT = ik_format(IQ4_KS, _SEARCH.size, _quantize, _decode)
