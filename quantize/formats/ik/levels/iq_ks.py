"""IQ2_KS to IQ5_KS: levels out of two sets, an integer for each 32 weights and a scale for the row."""

from __future__ import annotations

from functools import partial

import numpy as np

from gguf_tools.format.ggml_types import IQ2_KS, IQ3_KS, IQ4_KS, IQ5_KS
from quantize.formats.base import Bytes, Floats32
from quantize.formats.ik.levels.levels import LEVELS_2, LEVELS_3, LEVELS_4, LEVELS_5, level_coding
from quantize.formats.ik.levels.scale_search import Integers, ScaleTrials, in_order, row_quantizer
from quantize.formats.ik.rows import SUPER_ELEMS, ik_format
from quantize.simd.kernel import kernel
from quantize.simd.lane_memory import IntTile, tail
from quantize.simd.packing import pack, prepend_half

_trials = partial(ScaleTrials, size=32, sets=2, signs=1)

# ---- IQ2_KS

_IQ2_KS_BYTES = IQ2_KS.block_bytes


@kernel
def _decode_iq2_ks(data: Bytes, scales: Floats32, out: Floats32) -> None:
    """Decode IQ2_KS: 256 weights in 70 bytes, 2.1875 bits each, on four levels.

    A row starts with d, float16. Then come its blocks:

        bytes    field
        0 .. 1   extra   bit j is set if sub-block j uses the second set of LEVELS_2; bit 8 + j is bit 4 of
                         the scale sc[j]
        2 .. 5   scales  bits 0 .. 3: byte j holds sc[2 * j] in its lower half, sc[2 * j + 1] in the upper
        6 .. 69  qs      codes q of 2 bits: 32 bytes hold 128, the lowest bits first

    The value of weight i = 0 .. 31 in sub-block j = 0 .. 7:

        d * (sc[j] - 16) * level[q[32 * j + i]]

    Source: block_iq2_ks and dequantize_row_iq2_ks of ik_llama.cpp 8337e4c.
    """
    for row in range(len(out)):
        for k in range(out.shape[1] // SUPER_ELEMS):
            block = data[row, k * _IQ2_KS_BYTES : (k + 1) * _IQ2_KS_BYTES]
            for j in range(8):
                second = block[0] >> j & 1
                code = block[2 + j // 2] >> 4 * (j % 2) & 0xF | (block[1] >> j & 1) << 4
                scale = scales[row] * np.float32(code - 16)
                codes = block[6 + 32 * (j // 4) :]
                weights = out[row, k * SUPER_ELEMS + 32 * j :]
                for i in range(32):
                    weights[i] = scale * LEVELS_2[4 * second + (codes[i] >> 2 * (j % 4) & 3)]


_IQ2_KS_SEARCH = _trials(
    integers=Integers(-16, 15, 1),
    reach=31,
    factors=np.geomspace(0.45, 1.4, 10).astype(np.float32),
    spreads=np.array([1.0], np.float32),
    has_half=True,
)


@row_quantizer(_IQ2_KS_SEARCH, level_coding(LEVELS_2, 32), IQ2_KS)
def _quantize_iq2_ks(codes: IntTile, integers: IntTile, seconds: IntTile, words: IntTile) -> None:
    for j in range(8):
        integers[j] = integers[j] + 16
    words[0] = in_order(integers, 0, 8, 0, 4)
    pack(codes, 0, 2, 32, 64, tail(words, 1))
    prepend_half(in_order(seconds, 0, 8, 0, 1) | in_order(integers, 0, 8, 4, 1) << 8, words, 17)


# ---- IQ3_KS

_IQ3_KS_BYTES = IQ3_KS.block_bytes


@kernel
def _decode_iq3_ks(data: Bytes, scales: Floats32, out: Floats32) -> None:
    """Decode IQ3_KS: 256 weights in 102 bytes, 3.1875 bits each, on eight levels.

    A row starts with d, float16. Then come its blocks:

        bytes      field
        0 .. 1     extra   bit j is bit 4 of the scale sc[j]; bit 8 + j is set if sub-block j uses the second
                           set of LEVELS_3
        2 .. 5     scales  bits 0 .. 3: byte j holds sc[j] in its lower half, sc[j + 4] in the upper
        6 .. 69    qs      bits 0 .. 1 of the codes q: 32 bytes hold 128, the lowest bits first
        70 .. 101  qh      bit 2 of the codes: bit j of byte i is that of weight 32 * j + i

    The value of weight i = 0 .. 31 in sub-block j = 0 .. 7:

        d * (sc[j] - 16) * level[q[32 * j + i]]

    Source: block_iq3_ks and dequantize_row_iq3_ks of ik_llama.cpp 8337e4c.
    """
    for row in range(len(out)):
        for k in range(out.shape[1] // SUPER_ELEMS):
            block = data[row, k * _IQ3_KS_BYTES : (k + 1) * _IQ3_KS_BYTES]
            upper = block[70:]
            for j in range(8):
                second = block[1] >> j & 1
                code = block[2 + j % 4] >> 4 * (j // 4) & 0xF | (block[0] >> j & 1) << 4
                scale = scales[row] * np.float32(code - 16)
                lower = block[6 + 32 * (j // 4) :]
                weights = out[row, k * SUPER_ELEMS + 32 * j :]
                for i in range(32):
                    code = lower[i] >> 2 * (j % 4) & 3 | (upper[i] >> j & 1) << 2
                    weights[i] = scale * LEVELS_3[8 * second + code]


_IQ3_KS_SEARCH = _trials(
    integers=Integers(-16, 15, 1),
    reach=63,
    factors=np.geomspace(0.55, 1.5, 12).astype(np.float32),
    spreads=np.array([1.05], np.float32),
    has_half=True,
)


@row_quantizer(_IQ3_KS_SEARCH, level_coding(LEVELS_3, 32), IQ3_KS)
def _quantize_iq3_ks(codes: IntTile, integers: IntTile, seconds: IntTile, words: IntTile) -> None:
    for j in range(8):
        integers[j] = integers[j] + 16
    pack(integers, 0, 4, 4, 4, words)
    pack(codes, 0, 2, 32, 64, tail(words, 1))
    pack(codes, 2, 1, 32, 32, tail(words, 17))
    prepend_half(in_order(integers, 0, 8, 4, 1) | in_order(seconds, 0, 8, 0, 1) << 8, words, 25)


# ---- IQ4_KS

_IQ4_KS_BYTES = IQ4_KS.block_bytes


@kernel
def _decode_iq4_ks(data: Bytes, scales: Floats32, out: Floats32) -> None:
    """Decode IQ4_KS: 256 weights in 136 bytes, 4.25 bits each, on sixteen levels.

    A row starts with d, float32. Then come its blocks:

        bytes     field
        0 .. 7    scales  bits 1 .. 7 of byte j are the scale sc[j]; bit 0 is set if sub-block j uses the
                          second set of LEVELS_4
        8 .. 135  qs      codes q of 4 bits: 16 bytes hold 32, the lower halves first

    The value of weight i = 0 .. 31 in sub-block j = 0 .. 7:

        d * (2 * sc[j] - 127) * level[q[32 * j + i]]

    Source: block_iq4_ks and dequantize_row_iq4_ks of ik_llama.cpp 8337e4c.
    """
    for row in range(len(out)):
        for k in range(out.shape[1] // SUPER_ELEMS):
            block = data[row, k * _IQ4_KS_BYTES : (k + 1) * _IQ4_KS_BYTES]
            for j in range(8):
                first = 16 * (block[j] & 1)
                scale = scales[row] * np.float32((block[j] & 254) - 127)
                codes = block[8 + 16 * j :]
                weights = out[row, k * SUPER_ELEMS + 32 * j :]
                for i in range(16):
                    weights[i] = scale * LEVELS_4[first + (codes[i] & 0xF)]
                    weights[i + 16] = scale * LEVELS_4[first + (codes[i] >> 4)]


_IQ4_KS_SEARCH = _trials(
    integers=Integers(-127, 127, 2),
    reach=127,
    factors=np.geomspace(0.75, 1.5, 14).astype(np.float32),
    spreads=np.array([1.05], np.float32),
    has_half=False,
)


@row_quantizer(_IQ4_KS_SEARCH, level_coding(LEVELS_4, 32), IQ4_KS)
def _quantize_iq4_ks(codes: IntTile, integers: IntTile, seconds: IntTile, words: IntTile) -> None:
    for j in range(8):
        integers[j] = integers[j] + 127 | seconds[j]
    pack(integers, 0, 8, 8, 8, words)
    pack(codes, 0, 4, 16, 128, tail(words, 2))


# ---- IQ5_KS

_IQ5_KS_BYTES = IQ5_KS.block_bytes


@kernel
def _decode_iq5_ks(data: Bytes, scales: Floats32, out: Floats32) -> None:
    """Decode IQ5_KS: 256 weights in 168 bytes, 5.25 bits each, on 32 levels.

    A row starts with d, float32. Then come its blocks:

        bytes       field
        0 .. 7      scales  bits 1 .. 7 of byte j are the scale sc[j]; bit 0 is set if sub-block j uses the
                            second set of LEVELS_5
        8 .. 135    qs      bits 0 .. 3 of the codes q: 32 bytes hold 64, the lower halves first
        136 .. 167  qh      bit 4 of the codes: bit j of byte i is that of weight 32 * j + i

    The value of weight i = 0 .. 31 in sub-block j = 0 .. 7:

        d * (2 * sc[j] - 127) * level[q[32 * j + i]]

    Source: block_iq5_ks and dequantize_row_iq5_ks of ik_llama.cpp 8337e4c.
    """
    for row in range(len(out)):
        for k in range(out.shape[1] // SUPER_ELEMS):
            block = data[row, k * _IQ5_KS_BYTES : (k + 1) * _IQ5_KS_BYTES]
            upper = block[136:]
            for j in range(8):
                first = 32 * (block[j] & 1)
                scale = scales[row] * np.float32((block[j] & 254) - 127)
                lower = block[8 + 32 * (j // 2) :]
                weights = out[row, k * SUPER_ELEMS + 32 * j :]
                for i in range(32):
                    code = lower[i] >> 4 * (j % 2) & 0xF | (upper[i] >> j & 1) << 4
                    weights[i] = scale * LEVELS_5[first + code]


_IQ5_KS_SEARCH = _trials(
    integers=Integers(-127, 127, 2),
    reach=126,
    factors=np.geomspace(0.88, 1.4, 16).astype(np.float32),
    spreads=np.array([1.05], np.float32),
    has_half=False,
)


@row_quantizer(_IQ5_KS_SEARCH, level_coding(LEVELS_5, 32), IQ5_KS)
def _quantize_iq5_ks(codes: IntTile, integers: IntTile, seconds: IntTile, words: IntTile) -> None:
    for j in range(8):
        integers[j] = integers[j] + 127 | seconds[j]
    pack(integers, 0, 8, 8, 8, words)
    pack(codes, 0, 4, 32, 128, tail(words, 2))
    pack(codes, 4, 1, 32, 32, tail(words, 34))


FORMATS = (
    ik_format(IQ2_KS, _IQ2_KS_SEARCH.size, _quantize_iq2_ks, _decode_iq2_ks),
    ik_format(IQ3_KS, _IQ3_KS_SEARCH.size, _quantize_iq3_ks, _decode_iq3_ks),
    ik_format(IQ4_KS, _IQ4_KS_SEARCH.size, _quantize_iq4_ks, _decode_iq4_ks),
    ik_format(IQ5_KS, _IQ5_KS_SEARCH.size, _quantize_iq5_ks, _decode_iq5_ks),
)
