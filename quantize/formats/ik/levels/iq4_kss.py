"""IQ4_KSS: 256 weights in 128 bytes, 4 bits each, on sixteen levels out of two sets, a scale for the row.

A row starts with d, float32. Then come its blocks, eight sub-blocks of eight 16-bit words each. Bit 0 of word
k is bit k of s, the scale of the sub-block. Its other 15 bits, shifted right by one and combined with
themselves by exclusive or, are codes q of 4 bits: byte i of the sixteen holds q[i] in its lower half,
q[i + 16] in the upper. So the bits between two neighbours decide, and one bit of each word is free for s.

The value of weight i = 0 .. 31 in a sub-block, whose levels are the second set of LEVELS_4 if bit 0 of s is
set:

    d * ((s & 254) - 127) * level[q[i]]

Source: block_iq4_kss and dequantize_row_iq4_kss of ik_llama.cpp 8337e4c.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from gguf_tools.format.ggml_types import IQ4_KSS
from quantize.formats.base import Bytes, Floats32, QuantFormat, Rows
from quantize.formats.ik.levels.iq4_kss_coding import EVEN_CODING, SIZE, place_in_four
from quantize.formats.ik.levels.kernels import row_quantizer
from quantize.formats.ik.levels.levels import LEVELS_4, decode_scaled_rows
from quantize.formats.ik.levels.scale_search import Integers, Search
from quantize.formats.ik.rows import encode_scaled_rows
from quantize.importances.weighting import Weighting
from quantize.simd.kernel import inlinable, kernel
from quantize.simd.lane_memory import IntTile, tail
from quantize.simd.lanes import Ints, splat

BLOCK = np.dtype([("qs", "<u2", (8, 8))])


def encode(rows: Rows, weighting: Weighting | None) -> Bytes:
    """Return `rows` as IQ4_KSS."""
    return encode_scaled_rows(rows, weighting, IQ4_KSS, SIZE, _quantize, "<f4")


def decode(data: Bytes, n_cols: int) -> Floats32:
    """Return the weights of rows of IQ4_KSS."""
    return decode_scaled_rows(data, n_cols, IQ4_KSS, "<f4", _decode)


_BYTES = 16  # of a sub-block


@kernel
def _decode(
    data: npt.NDArray[np.uint8], scales: npt.NDArray[np.float32], out: npt.NDArray[np.float32]
) -> None:
    for row in range(len(out)):
        for j in range(out.shape[1] // 32):
            words = data[row, j * _BYTES : (j + 1) * _BYTES]
            code = 0
            for k in range(8):
                code |= (words[2 * k] & 1) << k
            first = 16 * (code & 1)
            scale = scales[row] * np.float32((code & 254) - 127)
            weights = out[row, 32 * j :]
            for k in range(8):
                word = words[2 * k] & 254 | words[2 * k + 1] << 8
                word ^= word >> 1
                for i in range(2):
                    packed = word >> 8 * i
                    weights[2 * k + i] = scale * LEVELS_4[first + (packed & 0xF)]
                    weights[2 * k + i + 16] = scale * LEVELS_4[first + (packed >> 4 & 0xF)]


_SEARCH = Search(
    size=SIZE,
    sets=2,
    integers=Integers(-127, 127, 2),
    reach=127,
    factors=np.geomspace(0.75, 1.5, 16).astype(np.float32),
    spreads=np.array([1.05], np.float32),
    signs=1,
    has_half=False,
)


@inlinable
def _word_of(codes: IntTile, four: int) -> Ints:
    """Return the word that decodes to a four: bit k is the exclusive or of bits k .. 15 of its codes."""
    word = splat(0)
    for i in range(4):
        word |= codes[place_in_four(four, i)] << 4 * i
    for shift in (1, 2, 4, 8):
        word ^= word >> shift
    return word


@inlinable
def _pack_block(codes: IntTile, integers: IntTile, seconds: IntTile, words: IntTile) -> None:
    for j in range(8):
        scale = integers[j] + 127 | seconds[j]
        for pair in range(4):
            word = splat(0)
            for half in range(2):
                k = 2 * pair + half
                word |= (_word_of(tail(codes, SIZE * j), k) | scale >> k & 1) << 16 * half
            words[4 * j + pair] = word


_quantize_rows = row_quantizer(_SEARCH, EVEN_CODING, BLOCK.itemsize, IQ4_KSS.row_meta_bytes, _pack_block)


@kernel
def _quantize(source: Rows, importances: Floats32, scales: Floats32, out: Bytes) -> int:
    return _quantize_rows(source, importances, scales, out)


FORMAT = QuantFormat(IQ4_KSS, encode, decode)
