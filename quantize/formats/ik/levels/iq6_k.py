"""IQ6_K: 256 weights in 212 bytes, 6.625 bits each, on sixty-four levels out of two sets.

    bytes       field
    0 .. 1      d       float16
    2 .. 3      extra   bit j is set if sub-block j uses the second set of levels
    4 .. 19     scales  sc, int8
    20 .. 147   qs      bits 0 .. 3 of the codes q: 32 bytes hold 64, the lower halves first
    148 .. 211  qh      bits 4 .. 5: 32 bytes hold those of 128 codes, the lowest bits first

The value of weight i = 0 .. 15 in sub-block j = 0 .. 15:

    d * sc[j] * level[q[16 * j + i]]

The levels are a polynomial of the code, plus 1 in the second set:

    -127 + q * (6.2568 + q * (-0.11218 + q * 0.0011972))

Source: block_iq6_k and dequantize_row_iq6_k of ik_llama.cpp 8337e4c.
"""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import numpy.typing as npt

from gguf_tools.format.ggml_types import IQ6_K
from quantize.formats.base import Bytes, Floats32, Rows
from quantize.formats.ik.levels.levels import level_coding
from quantize.formats.ik.levels.scale_search import Integers, ScaleTrials, block_quantizer, in_order
from quantize.formats.ik.rows import SUPER_ELEMS, ik_format
from quantize.simd.floats import float_at
from quantize.simd.kernel import inlinable, kernel
from quantize.simd.lane_memory import IntTile, tail
from quantize.simd.lanes import Ints
from quantize.simd.packing import pack

_BYTES = IQ6_K.block_bytes
_COEFFICIENTS = tuple(map(np.float32, (0.0011972, -0.11218, 6.2568, -127.0)))


def _round(value: Fraction) -> np.float32:
    """Return the float32 nearest to `value`, the even one of two."""
    near = np.float32(float(value))
    around = (near, np.nextafter(near, np.float32(-np.inf)), np.nextafter(near, np.float32(np.inf)))
    return min(around, key=lambda x: (abs(Fraction(float(x)) - value), int(x.view(np.uint32)) & 1))


def _levels() -> npt.NDArray[np.float32]:
    """Return both sets of levels; compilers contract each step of the polynomial to one that rounds once."""
    codes = range(64)
    levels = []
    for code in codes:
        value = _COEFFICIENTS[0]
        for coefficient in _COEFFICIENTS[1:]:
            value = _round(Fraction(float(value)) * code + Fraction(float(coefficient)))
        levels.append(value)
    first = np.array(levels, np.float32)
    return np.concatenate([first, first + np.float32(1)])


LEVELS_6 = _levels()


@kernel
def _decode(data: npt.NDArray[np.uint8], out: npt.NDArray[np.float32]) -> None:
    for k in range(data.size // _BYTES):
        block = data[k * _BYTES : (k + 1) * _BYTES]
        d = float_at(block, 0)
        for j in range(16):
            second = block[2 + j // 8] >> j % 8 & 1
            scale = d * np.float32(np.int8(block[4 + j]))
            lower = block[20 + 32 * (j // 4) + 16 * (j % 2) :]
            upper = block[148 + 32 * (j // 8) + 16 * (j % 2) :]
            weights = out[k * SUPER_ELEMS + 16 * j :]
            for i in range(16):
                code = lower[i] >> 4 * (j // 2 % 2) & 0xF | (upper[i] >> 2 * (j // 2 % 4) & 3) << 4
                weights[i] = scale * LEVELS_6[64 * second + code]


_CODING = level_coding(LEVELS_6, 16)
_SEARCH = ScaleTrials(
    size=16,
    sets=2,
    integers=Integers(-127, 127, 1),
    reach=127,
    factors=np.geomspace(0.98, 1.65, 24).astype(np.float32),
    spreads=np.array([1.15], np.float32),
    signs=1,
    has_half=True,
)


@inlinable
def _pack_block(half_d: Ints, codes: IntTile, integers: IntTile, seconds: IntTile, words: IntTile) -> None:
    words[0] = half_d | in_order(seconds, 0, 16, 0, 1) << 16
    pack(integers, 0, 8, 16, 16, tail(words, 1))
    pack(codes, 0, 4, 32, 128, tail(words, 5))
    pack(codes, 4, 2, 32, 64, tail(words, 37))


_quantize_blocks = block_quantizer(_SEARCH, _CODING, IQ6_K, _pack_block)


@kernel
def _quantize(source: Rows, importances: Floats32, out: Bytes) -> int:
    return _quantize_blocks(source, importances, out)


FORMAT = ik_format(IQ6_K, _SEARCH.size, _quantize, _decode)
