"""IQ2_K to IQ6_K: levels out of two sets, an integer for each 16 weights and a float16 for each 256."""

from __future__ import annotations

from functools import partial

import numpy as np

from gguf_tools.format.ggml_types import IQ2_K, IQ3_K, IQ4_K, IQ5_K, IQ6_K
from quantize.formats.base import Bytes, Floats32
from quantize.formats.ik.levels.levels import LEVELS_2, LEVELS_3, LEVELS_4, LEVELS_5, LEVELS_6, level_coding
from quantize.formats.ik.levels.scale_search import Integers, ScaleTrials, block_quantizer, in_order
from quantize.formats.ik.rows import SUPER_ELEMS, ik_format
from quantize.simd.floats import float_at
from quantize.simd.kernel import kernel
from quantize.simd.lane_memory import IntTile, tail
from quantize.simd.lanes import Ints, maximum, select, splat
from quantize.simd.packing import pack, prepend_half

_trials = partial(ScaleTrials, size=16, sets=2, has_half=True)

# ---- IQ2_K

_IQ2_K_BYTES = IQ2_K.block_bytes


@kernel
def _decode_iq2_k(data: Bytes, out: Floats32) -> None:
    """Decode IQ2_K: 256 weights in 76 bytes, 2.375 bits each, on four levels.

        bytes     field
        0 .. 1    d       float16
        2 .. 3    extra   bit j is set if sub-block j uses the second set of LEVELS_2
        4 .. 11   scales  sc of 4 bits: byte j holds sc[2 * j] in its lower half, sc[2 * j + 1] in the upper
        12 .. 75  qs      codes q of 2 bits: 32 bytes hold 128, the lowest bits first

    The value of weight i = 0 .. 15 in sub-block j = 0 .. 15:

        d * (sc[j] - 8) * level[q[16 * j + i]]

    Source: block_iq2_k and dequantize_row_iq2_k of ik_llama.cpp 8337e4c.
    """
    for k in range(data.size // _IQ2_K_BYTES):
        block = data[k * _IQ2_K_BYTES : (k + 1) * _IQ2_K_BYTES]
        d = float_at(block, 0)
        for j in range(16):
            second = block[2 + j // 8] >> j % 8 & 1
            scale = d * np.float32((block[4 + j // 2] >> 4 * (j % 2) & 0xF) - 8)
            codes = block[12 + 32 * (j // 8) + 16 * (j % 2) :]
            weights = out[k * SUPER_ELEMS + 16 * j :]
            for i in range(16):
                weights[i] = scale * LEVELS_2[4 * second + (codes[i] >> 2 * (j // 2 % 4) & 3)]


_IQ2_K_SEARCH = _trials(
    integers=Integers(-8, 7, 1),
    reach=31,
    factors=np.geomspace(0.44, 1.6, 12).astype(np.float32),
    spreads=np.array([0.93, 1.03], np.float32),
    signs=2,
)


@block_quantizer(_IQ2_K_SEARCH, level_coding(LEVELS_2, 16), IQ2_K)
def _quantize_iq2_k(
    half_d: Ints, codes: IntTile, integers: IntTile, seconds: IntTile, words: IntTile
) -> None:
    for j in range(16):
        integers[j] = integers[j] + 8
    words[0] = half_d | in_order(seconds, 0, 16, 0, 1) << 16
    words[1] = in_order(integers, 0, 8, 0, 4)
    words[2] = in_order(integers, 8, 8, 0, 4)
    pack(codes, 0, 2, 32, 64, tail(words, 3))


# ---- IQ3_K

_IQ3_K_BYTES = IQ3_K.block_bytes


@kernel
def _decode_iq3_k(data: Bytes, out: Floats32) -> None:
    """Decode IQ3_K: 256 weights in 110 bytes, 3.4375 bits each, on eight levels.

        bytes      field
        0 .. 1     d         float16
        2 .. 3     extra     bit j is set if sub-block j uses the second set of LEVELS_3
        4 .. 5     scales_h  bit j is set if the scale of sub-block j is negative
        6 .. 13    scales_l  magnitudes sc of 4 bits: byte j holds sc[2 * j] in its lower half, sc[2 * j + 1]
                             in the upper
        14 .. 77   qs        bits 0 .. 1 of the codes q: 32 bytes hold 128, the lowest bits first
        78 .. 109  qh        bit 2 of the codes: bit j of byte i is that of weight 32 * j + i

    The value of weight i = 0 .. 15 in sub-block j = 0 .. 15:

        d * (2 * sc[j] + 1) * sign[j] * level[q[16 * j + i]]

    Source: block_iq3_k and dequantize_row_iq3_k of ik_llama.cpp 8337e4c.
    """
    for k in range(data.size // _IQ3_K_BYTES):
        block = data[k * _IQ3_K_BYTES : (k + 1) * _IQ3_K_BYTES]
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


_IQ3_K_SEARCH = _trials(
    integers=Integers(-31, 31, 2),
    reach=63,
    factors=np.geomspace(0.62, 1.65, 12).astype(np.float32),
    spreads=np.array([1.0, 1.1], np.float32),
    signs=1,
)


@block_quantizer(_IQ3_K_SEARCH, level_coding(LEVELS_3, 16), IQ3_K)
def _quantize_iq3_k(
    half_d: Ints, codes: IntTile, integers: IntTile, seconds: IntTile, words: IntTile
) -> None:
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


# ---- IQ4_K

_IQ4_K_BYTES = IQ4_K.block_bytes


@kernel
def _decode_iq4_k(data: Bytes, out: Floats32) -> None:
    """Decode IQ4_K: 256 weights in 144 bytes, 4.5 bits each, on sixteen levels.

        bytes      field
        0 .. 1     d         float16
        2 .. 3     extra     bit j is set if sub-block j uses the second set of LEVELS_4
        4 .. 7     scales_h  bits 4 .. 5 of the scales sc: byte j has those of sc[4 * j] .. sc[4 * j + 3],
                             lowest bits first
        8 .. 15    scales_l  bits 0 .. 3: byte j holds sc[2 * j] in its lower half, sc[2 * j + 1]
                             in the upper
        16 .. 143  qs        codes q of 4 bits: 16 bytes hold 32, the lower halves first

    The value of weight i = 0 .. 15 in sub-block j = 0 .. 15:

        d * (sc[j] - 32) * level[q[16 * j + i]]

    Source: block_iq4_k and dequantize_row_iq4_k of ik_llama.cpp 8337e4c.
    """
    for k in range(data.size // _IQ4_K_BYTES):
        block = data[k * _IQ4_K_BYTES : (k + 1) * _IQ4_K_BYTES]
        d = float_at(block, 0)
        for j in range(16):
            second = block[2 + j // 8] >> j % 8 & 1
            upper = block[4 + j // 4] >> 2 * (j % 4) & 3
            scale = d * np.float32((block[8 + j // 2] >> 4 * (j % 2) & 0xF | upper << 4) - 32)
            codes = block[16 + 16 * (j // 2) :]
            weights = out[k * SUPER_ELEMS + 16 * j :]
            for i in range(16):
                weights[i] = scale * LEVELS_4[16 * second + (codes[i] >> 4 * (j % 2) & 0xF)]


_IQ4_K_SEARCH = _trials(
    integers=Integers(-32, 31, 1),
    reach=127,
    factors=np.geomspace(0.83, 1.6, 14).astype(np.float32),
    spreads=np.array([1.05, 1.16], np.float32),
    signs=1,
)


@block_quantizer(_IQ4_K_SEARCH, level_coding(LEVELS_4, 16), IQ4_K)
def _quantize_iq4_k(
    half_d: Ints, codes: IntTile, integers: IntTile, seconds: IntTile, words: IntTile
) -> None:
    for j in range(16):
        integers[j] = integers[j] + 32
    words[0] = half_d | in_order(seconds, 0, 16, 0, 1) << 16
    words[1] = in_order(integers, 0, 16, 4, 2)
    words[2] = in_order(integers, 0, 8, 0, 4)
    words[3] = in_order(integers, 8, 8, 0, 4)
    pack(codes, 0, 4, 16, 128, tail(words, 4))


# ---- IQ5_K

_IQ5_K_BYTES = IQ5_K.block_bytes


@kernel
def _decode_iq5_k(data: Bytes, out: Floats32) -> None:
    """Decode IQ5_K: 256 weights in 176 bytes, 5.5 bits each, on thirty-two levels.

        bytes       field
        0 .. 1      d         float16
        2 .. 3      extra     bit j is set if sub-block j uses the second set of LEVELS_5
        4 .. 7      scales_h  bits 4 .. 5 of the scales sc: byte j has those of sc[4 * j] .. sc[4 * j + 3],
                              lowest bits first
        8 .. 15     scales_l  bits 0 .. 3: byte j holds sc[2 * j] in its lower half, sc[2 * j + 1]
                              in the upper
        16 .. 143   qs        bits 0 .. 3 of the codes q: 32 bytes hold 64, the lower halves first
        144 .. 175  qh        bit 4 of the codes: bit j of byte i is that of weight 32 * j + i

    The value of weight i = 0 .. 15 in sub-block j = 0 .. 15:

        d * (sc[j] - 32) * level[q[16 * j + i]]

    Source: block_iq5_k and dequantize_row_iq5_k of ik_llama.cpp 8337e4c.
    """
    for k in range(data.size // _IQ5_K_BYTES):
        block = data[k * _IQ5_K_BYTES : (k + 1) * _IQ5_K_BYTES]
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


_IQ5_K_SEARCH = _trials(
    integers=Integers(-32, 31, 1),
    reach=126,
    factors=np.geomspace(0.9, 1.65, 18).astype(np.float32),
    spreads=np.array([1.05, 1.16], np.float32),
    signs=1,
)


@block_quantizer(_IQ5_K_SEARCH, level_coding(LEVELS_5, 16), IQ5_K)
def _quantize_iq5_k(
    half_d: Ints, codes: IntTile, integers: IntTile, seconds: IntTile, words: IntTile
) -> None:
    for j in range(16):
        integers[j] = integers[j] + 32
    words[0] = half_d | in_order(seconds, 0, 16, 0, 1) << 16
    words[1] = in_order(integers, 0, 16, 4, 2)
    words[2] = in_order(integers, 0, 8, 0, 4)
    words[3] = in_order(integers, 8, 8, 0, 4)
    pack(codes, 0, 4, 32, 128, tail(words, 4))
    pack(codes, 4, 1, 32, 32, tail(words, 36))


# ---- IQ6_K

_IQ6_K_BYTES = IQ6_K.block_bytes


@kernel
def _decode_iq6_k(data: Bytes, out: Floats32) -> None:
    """Decode IQ6_K: 256 weights in 212 bytes, 6.625 bits each, on sixty-four levels.

        bytes       field
        0 .. 1      d       float16
        2 .. 3      extra   bit j is set if sub-block j uses the second set of LEVELS_6
        4 .. 19     scales  sc, int8
        20 .. 147   qs      bits 0 .. 3 of the codes q: 32 bytes hold 64, the lower halves first
        148 .. 211  qh      bits 4 .. 5: 32 bytes hold those of 128 codes, the lowest bits first

    The value of weight i = 0 .. 15 in sub-block j = 0 .. 15:

        d * sc[j] * level[q[16 * j + i]]

    Source: block_iq6_k and dequantize_row_iq6_k of ik_llama.cpp 8337e4c.
    """
    for k in range(data.size // _IQ6_K_BYTES):
        block = data[k * _IQ6_K_BYTES : (k + 1) * _IQ6_K_BYTES]
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


_IQ6_K_SEARCH = _trials(
    integers=Integers(-127, 127, 1),
    reach=127,
    factors=np.geomspace(0.98, 1.65, 24).astype(np.float32),
    spreads=np.array([1.15], np.float32),
    signs=1,
)


@block_quantizer(_IQ6_K_SEARCH, level_coding(LEVELS_6, 16), IQ6_K)
def _quantize_iq6_k(
    half_d: Ints, codes: IntTile, integers: IntTile, seconds: IntTile, words: IntTile
) -> None:
    words[0] = half_d | in_order(seconds, 0, 16, 0, 1) << 16
    pack(integers, 0, 8, 16, 16, tail(words, 1))
    pack(codes, 0, 4, 32, 128, tail(words, 5))
    pack(codes, 4, 2, 32, 64, tail(words, 37))


FORMATS = (
    ik_format(IQ2_K, _IQ2_K_SEARCH.size, _quantize_iq2_k, _decode_iq2_k),
    ik_format(IQ3_K, _IQ3_K_SEARCH.size, _quantize_iq3_k, _decode_iq3_k),
    ik_format(IQ4_K, _IQ4_K_SEARCH.size, _quantize_iq4_k, _decode_iq4_k),
    ik_format(IQ5_K, _IQ5_K_SEARCH.size, _quantize_iq5_k, _decode_iq5_k),
    ik_format(IQ6_K, _IQ6_K_SEARCH.size, _quantize_iq6_k, _decode_iq6_k),
)
