"""IQ4_NL and IQ4_XS: sixteen levels, closer together near zero."""

from __future__ import annotations

import numpy as np

from gguf_tools.format.ggml_types import IQ4_NL, IQ4_XS
from quantize.formats.base import Bytes, Floats32, block_format
from quantize.formats.block_kernels import plain_kernel, weighted_kernel
from quantize.formats.iq.iq4_search import ELEMS, levels_of, nearest_code, search_levels
from quantize.formats.search import farthest_from_zero
from quantize.simd.floats import ONE, ZERO, clamp, float_at, nearest_int, to_half_bits
from quantize.simd.kernel import inlinable, kernel
from quantize.simd.lane_memory import FloatTile, IntTile, float_tile, int_tile, load, store, tail
from quantize.simd.lanes import LANES, Floats, select, splat, square_root, to_float
from quantize.simd.packing import pack, prepend_half

# ---- IQ4_NL

_IQ4_NL_BYTES = IQ4_NL.block_bytes
_IQ4_NL_TWICE_MEAN = np.float32(2 / ELEMS)


@kernel
def _decode_iq4_nl(data: Bytes, out: Floats32) -> None:
    """Decode IQ4_NL: 32 weights in 18 bytes, 4.5 bits each, on levels that lie closer together near zero.

        bytes     field
        0 .. 1    d   float16
        2 .. 17   qs  codes q of 4 bits: byte i holds q[i] in its lower half and q[i + 16] in the upper

    weight[i] = d * level[q[i]], the sixteen levels being

        -127 -104 -83 -65 -49 -35 -22 -10 1 13 25 38 53 69 89 113
    """
    for k in range(data.size // _IQ4_NL_BYTES):
        start = k * _IQ4_NL_BYTES
        d = float_at(data, start)
        packed = load(data, start + 2)
        store(out, k * ELEMS, d * levels_of(packed & 0xF))
        store(out, k * ELEMS + LANES, d * levels_of(packed >> 4))


@plain_kernel(IQ4_NL)
def _quantize_plain_iq4_nl(x: FloatTile, words: IntTile) -> None:
    weights = float_tile(ELEMS)
    for i in range(ELEMS):
        weights[i] = x[i] * x[i]
    _encode_iq4_nl(x, search_levels(x, weights), words)


@weighted_kernel(IQ4_NL)
def _quantize_weighted_iq4_nl(x: FloatTile, weights: FloatTile, words: IntTile) -> None:
    total = splat(ZERO)
    for i in range(ELEMS):
        total += x[i] * x[i]
    spread = _IQ4_NL_TWICE_MEAN * total
    for i in range(ELEMS):
        weights[i] = weights[i] * square_root(spread + x[i] * x[i])
    _encode_iq4_nl(x, search_levels(x, weights), words)


@inlinable
def _encode_iq4_nl(x: FloatTile, d: Floats, words: IntTile) -> None:
    """Fill `words`."""
    codes = int_tile(ELEMS)
    inverse = select(d != ZERO, ONE / d, ZERO)
    for i in range(ELEMS):
        codes[i] = nearest_code(inverse * x[i])
    pack(codes, 0, 4, 16, 16, words)
    prepend_half(to_half_bits(d), words, 4)


# ---- IQ4_XS

_IQ4_XS_BYTES = IQ4_XS.block_bytes
_SUPER_ELEMS = 256
_SUBS = _SUPER_ELEMS // ELEMS
_SCALE_HALF = 32
_IQ4_XS_TWICE_MEAN = np.float32(2 / _SUPER_ELEMS)


@kernel
def _decode_iq4_xs(data: Bytes, out: Floats32) -> None:
    """Decode IQ4_XS: 256 weights in 136 bytes, 4.25 bits each, on levels that lie closer together near zero.

        bytes       field
        0 .. 1      d         float16
        2 .. 3      scales_h  bits 4 .. 5 of the scales sc: those of sc[j] are bits 2 * j and 2 * j + 1
        4 .. 7      scales_l  bits 0 .. 3 of the scales: byte j holds sc[2 * j] in its lower half,
                              sc[2 * j + 1] in the upper
        8 .. 135    qs        codes q of 4 bits: 16 bytes hold 32, the lower halves first (packing.pack)

    The value of weight i = 0 .. 31 in sub-block j = 0 .. 7:

        d * (sc[j] - 32) * level[q[32 * j + i]]

    The sixteen levels are those of IQ4_NL.
    """
    for k in range(data.size // _IQ4_XS_BYTES):
        start = k * _IQ4_XS_BYTES
        d = float_at(data, start)
        upper = data[start + 2] | data[start + 3] << 8
        for j in range(_SUBS):
            scale_code = data[start + 4 + j // 2] >> 4 * (j % 2) & 0xF | (upper >> 2 * j & 3) << 4
            scale = d * np.float32(scale_code - _SCALE_HALF)
            packed = load(data, start + 8 + 16 * j)
            first = k * _SUPER_ELEMS + j * ELEMS
            store(out, first, scale * levels_of(packed & 0xF))
            store(out, first + LANES, scale * levels_of(packed >> 4))


@plain_kernel(IQ4_XS)
def _quantize_plain_iq4_xs(x: FloatTile, words: IntTile) -> None:
    weights = float_tile(256)
    for i in range(_SUPER_ELEMS):
        weights[i] = x[i] * x[i]
    _encode_iq4_xs(x, weights, words)


@weighted_kernel(IQ4_XS)
def _quantize_weighted_iq4_xs(x: FloatTile, weights: FloatTile, words: IntTile) -> None:
    total = splat(ZERO)
    for i in range(_SUPER_ELEMS):
        total += x[i] * x[i]
    spread = _IQ4_XS_TWICE_MEAN * total
    for i in range(_SUPER_ELEMS):
        weights[i] = weights[i] * square_root(spread + x[i] * x[i])
    _encode_iq4_xs(x, weights, words)


@inlinable
def _encode_iq4_xs(x: FloatTile, weights: FloatTile, words: IntTile) -> None:
    """Fill `words`."""
    scales, codes = float_tile(8), int_tile(256)
    for j in range(_SUBS):
        scales[j] = search_levels(tail(x, ELEMS * j), tail(weights, ELEMS * j))
    _largest, extreme = farthest_from_zero(scales, _SUBS)
    d = -extreme / np.float32(_SCALE_HALF)
    inverse_d = select(d != ZERO, ONE / d, ZERO)
    upper = splat(0)
    lower = splat(0)
    for j in range(_SUBS):
        level = clamp(nearest_int(inverse_d * scales[j]), -_SCALE_HALF, _SCALE_HALF - 1)
        scale = d * to_float(level)
        inverse = select(scale != ZERO, ONE / scale, ZERO)
        for i in range(ELEMS * j, ELEMS * (j + 1)):
            codes[i] = nearest_code(inverse * x[i])
        lower |= (level + _SCALE_HALF & 0xF) << 4 * j
        upper |= (level + _SCALE_HALF >> 4) << 2 * j
    words[0] = to_half_bits(d) | upper << 16
    words[1] = lower
    pack(codes, 0, 4, 16, 128, tail(words, 2))


FORMATS = (
    block_format(IQ4_NL, _decode_iq4_nl, _quantize_plain_iq4_nl, _quantize_weighted_iq4_nl),
    block_format(IQ4_XS, _decode_iq4_xs, _quantize_plain_iq4_xs, _quantize_weighted_iq4_xs),
)
