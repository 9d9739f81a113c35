"""IQ2_KL: 256 weights in 86 bytes, 2.6875 bits each, in pairs of levels, with a scale for the row.

A row starts with d, float16. Then come its blocks:

    bytes     field
    0 .. 1    scales_h  bits 4 .. 5 of the scales sc: those of sc[j] are bits 2 * j and 2 * j + 1
    2 .. 5    scales_l  bits 0 .. 3: byte j holds sc[j] in its lower half, sc[j + 4] in the upper
    6 .. 69   qs        bits 0 .. 3 of the codes q: 16 bytes hold 32, the lower halves first
    70 .. 85  qh        bit 4 of the codes: bit j of byte i is that of q[16 * j + i]

A code stands for two weights, a pair of LEVEL_PAIRS. The values of pair i = 0 .. 15 in sub-block j = 0 .. 7:

    d * (sc[j] - 32) * pair[q[16 * j + i]]

Source: block_iq2_kl and dequantize_row_iq2_kl of ik_llama.cpp 8337e4c.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from gguf_tools.format.ggml_types import IQ2_KL
from quantize.formats.base import Bytes, Floats32, QuantFormat, Rows
from quantize.formats.ik.levels.iq2_kl_coding import PAIR_CODING, SIZE
from quantize.formats.ik.levels.kernels import in_order, row_quantizer
from quantize.formats.ik.levels.levels import LEVEL_PAIRS, SUPER_ELEMS, decode_scaled_rows
from quantize.formats.ik.levels.scale_search import Integers, Search
from quantize.formats.ik.rows import encode_scaled_rows
from quantize.importances.weighting import Weighting
from quantize.simd.kernel import inlinable, kernel
from quantize.simd.lane_memory import IntTile, tail
from quantize.simd.packing import pack, prepend_half

BLOCK = np.dtype([("scales_h", "<u2"), ("scales_l", "u1", 4), ("qs", "u1", 64), ("qh", "u1", 16)])


def encode(rows: Rows, weighting: Weighting | None) -> Bytes:
    """Return `rows` as IQ2_KL."""
    return encode_scaled_rows(rows, weighting, IQ2_KL, SIZE, _quantize, "<f2")


def decode(data: Bytes, n_cols: int) -> Floats32:
    """Return the weights of rows of IQ2_KL."""
    return decode_scaled_rows(data, n_cols, IQ2_KL, "<f2", _decode)


_BYTES = BLOCK.itemsize


@kernel
def _decode(
    data: npt.NDArray[np.uint8], scales: npt.NDArray[np.float32], out: npt.NDArray[np.float32]
) -> None:
    for row in range(len(out)):
        for k in range(out.shape[1] // SUPER_ELEMS):
            block = data[row, k * _BYTES : (k + 1) * _BYTES]
            upper = block[70:]
            for j in range(8):
                high_bits = block[j // 4] >> 2 * (j % 4) & 3
                code = block[2 + j % 4] >> 4 * (j // 4) & 0xF | high_bits << 4
                scale = scales[row] * np.float32(code - 32)
                lower = block[6 + 16 * (j // 2) :]
                weights = out[row, k * SUPER_ELEMS + 32 * j :]
                for i in range(16):
                    code = lower[i] >> 4 * (j % 2) & 0xF | (upper[i] >> j & 1) << 4
                    weights[2 * i] = scale * LEVEL_PAIRS[2 * code]
                    weights[2 * i + 1] = scale * LEVEL_PAIRS[2 * code + 1]


_SEARCH = Search(
    size=SIZE,
    sets=1,
    integers=Integers(-32, 31, 1),
    reach=63,
    factors=np.geomspace(0.5, 1.5, 10).astype(np.float32),
    spreads=np.array([1.05], np.float32),
    signs=1,
    has_half=True,
)


@inlinable
def _pack_block(codes: IntTile, integers: IntTile, _seconds: IntTile, words: IntTile) -> None:
    for j in range(8):
        integers[j] = integers[j] + 32
        for i in range(16):  # sixteen codes a sub-block, one after the other
            codes[16 * j + i] = codes[SIZE * j + i]
    pack(integers, 0, 4, 4, 4, words)
    pack(codes, 0, 4, 16, 64, tail(words, 1))
    pack(codes, 4, 1, 16, 16, tail(words, 17))
    prepend_half(in_order(integers, 0, 8, 4, 2), words, 21)


_quantize_rows = row_quantizer(_SEARCH, PAIR_CODING, _BYTES, IQ2_KL.row_meta_bytes, _pack_block)


@kernel
def _quantize(source: Rows, importances: Floats32, scales: Floats32, out: Bytes) -> int:
    return _quantize_rows(source, importances, scales, out)


FORMAT = QuantFormat(IQ2_KL, encode, decode)
