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

from gguf_tools.format.ggml_types import IQ2_KL
from quantize.formats.base import Bytes, Floats32
from quantize.formats.ik.levels.levels import LEVEL_PAIRS, LEVELS_3
from quantize.formats.ik.levels.scale_search import Coding, Integers, ScaleTrials, in_order, row_quantizer
from quantize.formats.ik.rows import SUPER_ELEMS, ik_format
from quantize.simd.floats import INFINITY, ONE, ZERO
from quantize.simd.kernel import inlinable, kernel
from quantize.simd.lane_items import look_up_in
from quantize.simd.lane_memory import FloatTile, IntTile, float_tile, int_tile, tail
from quantize.simd.lanes import Floats, minimum, select, splat
from quantize.simd.packing import pack, prepend_half

_BYTES = IQ2_KL.block_bytes


@kernel
def _decode(data: Bytes, scales: Floats32, out: Floats32) -> None:
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


# ---- how sub-blocks are coded: in pairs, each the nearest of 32 pairs of levels

_SIZE = 32

_LEVELS = LEVELS_3[:8]
_FIRSTS = np.searchsorted(_LEVELS, LEVEL_PAIRS[::2]).astype(np.int32)
_SECONDS = np.searchsorted(_LEVELS, LEVEL_PAIRS[1::2]).astype(np.int32)
_FIRST_LEVELS = np.ascontiguousarray(LEVEL_PAIRS[::2])
_SECOND_LEVELS = np.ascontiguousarray(LEVEL_PAIRS[1::2])


@inlinable
def _errors_of(number: Floats, cost: np.float32, errors: FloatTile) -> None:
    """Fill `errors`, Floats (8), with what each level costs."""
    for k in range(8):
        distance = number - _LEVELS[k]
        errors[k] = cost * (distance * distance)


@inlinable
def _error_of(x: FloatTile, importances: Floats32, column: int, scale: Floats, _second: np.float32) -> Floats:
    inverse = ONE / scale
    firsts, seconds = float_tile(8), float_tile(8)
    total = splat(ZERO)
    for i in range(0, _SIZE, 2):
        _errors_of(x[i] * inverse, importances[column + i], firsts)
        _errors_of(x[i + 1] * inverse, importances[column + i + 1], seconds)
        least = splat(INFINITY)
        for code in range(32):
            least = minimum(firsts[_FIRSTS[code]] + seconds[_SECONDS[code]], least)
        total += least
    return total * (scale * scale)


@inlinable
def _choose(x: FloatTile, importances: Floats32, column: int, scale: Floats, codes: IntTile) -> None:
    """Fill `codes`, Ints (16)."""
    inverse = ONE / scale
    firsts, seconds = float_tile(8), float_tile(8)
    for i in range(0, _SIZE, 2):
        _errors_of(x[i] * inverse, importances[column + i], firsts)
        _errors_of(x[i + 1] * inverse, importances[column + i + 1], seconds)
        least = splat(INFINITY)
        chosen = splat(0)
        for code in range(32):
            error = firsts[_FIRSTS[code]] + seconds[_SECONDS[code]]
            better = error < least
            least = select(better, error, least)
            chosen = select(better, splat(code), chosen)
        codes[i >> 1] = chosen


@inlinable
def _sums_of(
    x: FloatTile, importances: Floats32, column: int, scale: Floats, _second: Floats
) -> tuple[Floats, Floats]:
    codes = int_tile(16)
    _choose(x, importances, column, scale, codes)
    sum_lx = splat(ZERO)
    sum_l2 = splat(ZERO)
    for i in range(_SIZE):
        levels = _SECOND_LEVELS if i & 1 else _FIRST_LEVELS
        level = look_up_in(levels, 32, codes[i >> 1])
        weighted = importances[column + i] * level
        sum_lx += weighted * x[i]
        sum_l2 += weighted * level
    return sum_lx, sum_l2


@inlinable
def _codes_of(
    x: FloatTile, importances: Floats32, column: int, scale: Floats, _second: Floats, codes: IntTile
) -> None:
    """Fill the first 16 of the sub-block's codes."""
    _choose(x, importances, column, scale, codes)


_CODING = Coding(_error_of, _sums_of, _codes_of)


# ---- rows

_IQ2_KL_SEARCH = ScaleTrials(
    size=_SIZE,
    sets=1,
    integers=Integers(-32, 31, 1),
    reach=63,
    factors=np.geomspace(0.5, 1.5, 10).astype(np.float32),
    spreads=np.array([1.05], np.float32),
    signs=1,
    has_half=True,
)


@row_quantizer(_IQ2_KL_SEARCH, _CODING, IQ2_KL)
def _quantize(codes: IntTile, integers: IntTile, _seconds: IntTile, words: IntTile) -> None:
    for j in range(8):
        integers[j] = integers[j] + 32
        for i in range(16):  # sixteen codes a sub-block, one after the other
            codes[16 * j + i] = codes[_SIZE * j + i]
    pack(integers, 0, 4, 4, 4, words)
    pack(codes, 0, 4, 16, 64, tail(words, 1))
    pack(codes, 4, 1, 16, 16, tail(words, 17))
    prepend_half(in_order(integers, 0, 8, 4, 2), words, 21)


FORMATS = (ik_format(IQ2_KL, _SIZE, _quantize, _decode),)
