"""IQ1_KT to IQ4_KT: groups of weights on a trellis, and a scale for the row."""

from __future__ import annotations

import numpy as np

from gguf_tools.format.ggml_types import IQ1_KT, IQ2_KT, IQ3_KT, IQ4_KT
from quantize.formats.base import Bytes, Floats32, block_dtype
from quantize.formats.ik.levels.levels import LEVELS_4
from quantize.formats.ik.rows import SUPER_ELEMS
from quantize.formats.ik.trellis.encoding import Choices, trellis_format
from quantize.formats.ik.trellis.rows import Trellis
from quantize.formats.ik.trellis.trellis import START, level, step, walk
from quantize.simd.kernel import kernel

# ---- IQ1_KT

_IQ1_KT_BLOCK = block_dtype(IQ1_KT)
_IQ1_KT_BYTES = _IQ1_KT_BLOCK.itemsize
_IQ1_KT_GROUP = 8
_IQ1_KT_TRELLIS = Trellis(
    type=IQ1_KT,
    bits=13,
    dim=_IQ1_KT_GROUP,
    levels=LEVELS_4[:16],
    goal=0.0205,
    reach=120,
    trials=((1.0, 0), (-1.0, 0), (1.1, 0)),
    kept_nodes=16,
    kept_leaves=2,
)


def _pack_iq1_kt(choices: Choices, _weights: Floats32, out: Bytes) -> None:
    blocks, indices = out.view(_IQ1_KT_BLOCK)[:, 0], choices.indices
    top = (indices >> 12).reshape(-1, 8, 4) << np.arange(4, 8)
    blocks["sh"] = choices.codes | top.sum(axis=2)
    blocks["ql"] = indices & 0xFF
    upper = indices >> 8 & 0xF
    blocks["qh"] = upper[:, :16] | upper[:, 16:] << 4


@kernel
def _decode_iq1_kt(data: Bytes, scales: Floats32, out: Floats32) -> None:
    """Decode IQ1_KT: 256 weights in 56 bytes, 1.75 bits each.

    A row starts with d, float32. Then come its blocks. An index of 13 bits is for a group of 8 weights.

        bytes     field
        0 .. 7    sh  bits 0 .. 3 of byte j choose the scale s of sub-block j: the first set of LEVELS_4; bits
                      4 .. 7 are bit 12 of its four indices
        8 .. 39   ql  bits 0 .. 7 of the 32 indices
        40 .. 55  qh  bits 8 .. 11: byte g holds those of index g in its lower half, of g + 16 in the upper

    The weights of a group are d * s times the eight levels of `trellis` from its index on.

    Source: block_iq1_kt and dequantize_row_iq1_kt of ik_llama.cpp 8337e4c.
    """
    for row in range(len(out)):
        for k in range(out.shape[1] // SUPER_ELEMS):
            block = data[row, k * _IQ1_KT_BYTES : (k + 1) * _IQ1_KT_BYTES]
            for g in range(32):
                own = block[g // 4]
                scale = scales[row] * LEVELS_4[own & 0xF]
                index = block[8 + g] | (block[40 + g % 16] >> 4 * (g // 16) & 0xF) << 8
                index |= (own >> 4 + g % 4 & 1) << 12
                walk(index + START, scale, out[row, k * SUPER_ELEMS + _IQ1_KT_GROUP * g :], _IQ1_KT_GROUP)


# ---- IQ2_KT

_IQ2_KT_BLOCK = block_dtype(IQ2_KT)
_IQ2_KT_BYTES = _IQ2_KT_BLOCK.itemsize
_IQ2_KT_GROUP = 8
_IQ2_KT_TRELLIS = Trellis(
    type=IQ2_KT,
    bits=16,
    dim=_IQ2_KT_GROUP,
    levels=LEVELS_4[:16],
    goal=0.0235,
    reach=120,
    trials=((1.0, 0), (-1.0, 0)),
    kept_nodes=32,
    kept_leaves=3,
)


def _pack_iq2_kt(choices: Choices, _weights: Floats32, out: Bytes) -> None:
    blocks = out.view(_IQ2_KT_BLOCK)[:, 0]
    blocks["scales"] = choices.codes[:, :4] | choices.codes[:, 4:] << 4
    blocks["ql"] = choices.indices


@kernel
def _decode_iq2_kt(data: Bytes, scales: Floats32, out: Floats32) -> None:
    """Decode IQ2_KT: 256 weights in 68 bytes, 2.125 bits each.

    A row starts with d, float32. Then come its blocks. An index of 16 bits is for a group of 8 weights.

        bytes    field
        0 .. 3   scales  the lower half of byte j chooses the scale s of sub-block j, the upper that of j + 4:
                         the first set of LEVELS_4
        4 .. 67  ql      the 32 indices

    The weights of a group are d * s times the eight levels of `trellis` from its index on.

    Source: block_iq2_kt and dequantize_row_iq2_kt of ik_llama.cpp 8337e4c.
    """
    for row in range(len(out)):
        for k in range(out.shape[1] // SUPER_ELEMS):
            block = data[row, k * _IQ2_KT_BYTES : (k + 1) * _IQ2_KT_BYTES]
            for g in range(32):
                scale = scales[row] * LEVELS_4[block[g // 4 % 4] >> 4 * (g // 16) & 0xF]
                index = block[4 + 2 * g] | block[5 + 2 * g] << 8
                walk(index + START, scale, out[row, k * SUPER_ELEMS + _IQ2_KT_GROUP * g :], _IQ2_KT_GROUP)


# ---- IQ3_KT

_IQ3_KT_BLOCK = block_dtype(IQ3_KT)
_IQ3_KT_BYTES = _IQ3_KT_BLOCK.itemsize
_IQ3_KT_GROUP = 8
_IQ3_KT_TRELLIS = Trellis(
    type=IQ3_KT,
    bits=16,
    dim=_IQ3_KT_GROUP,
    levels=np.arange(16, dtype=np.float32),
    goal=0.025,
    reach=14,
    trials=((1.0, 0), (1.1, 0), (0.9, 0), (1.2, 0), (0.8, 0)),
    kept_nodes=32,
    kept_leaves=3,
    magnitudes=True,
)


def _pack_iq3_kt(choices: Choices, weights: Floats32, out: Bytes) -> None:
    blocks = out.view(_IQ3_KT_BLOCK)[:, 0]
    blocks["scales"] = choices.codes[:, :4] | choices.codes[:, 4:] << 4
    blocks["ql"] = choices.indices
    signs = (weights < 0).reshape(-1, 8, 32)
    blocks["qh"] = np.packbits(signs, axis=1, bitorder="little")[:, 0]


@kernel
def _decode_iq3_kt(data: Bytes, scales: Floats32, out: Floats32) -> None:
    """Decode IQ3_KT: 256 weights in 100 bytes, 3.125 bits each; the trellis has magnitudes.

    A row starts with d, float32. Then come its blocks. An index of 16 bits is for a group of 8 weights.

        bytes     field
        0 .. 3    scales  s: byte j holds that of sub-block j in its lower half, that of j + 4 in the upper
        4 .. 67   ql      the 32 indices
        68 .. 99  qh      signs: bit j of byte i is set if weight 32 * j + i is negative

    The magnitudes of a group are d * s times those of the eight levels of `trellis` from its index on.

    Source: block_iq3_kt and dequantize_row_iq3_kt of ik_llama.cpp 8337e4c.
    """
    for row in range(len(out)):
        for k in range(out.shape[1] // SUPER_ELEMS):
            block = data[row, k * _IQ3_KT_BYTES : (k + 1) * _IQ3_KT_BYTES]
            for g in range(32):
                scale = scales[row] * np.float32(block[g // 4 % 4] >> 4 * (g // 16) & 0xF)
                number = np.uint32((block[4 + 2 * g] | block[5 + 2 * g] << 8) + START)
                signs = block[68 + _IQ3_KT_GROUP * (g % 4) :]
                weights = out[row, k * SUPER_ELEMS + _IQ3_KT_GROUP * g :]
                for i in range(_IQ3_KT_GROUP):
                    number = step(number)
                    weight = scale * abs(level(number))
                    weights[i] = -weight if signs[i] >> g // 4 & 1 else weight


# ---- IQ4_KT

_IQ4_KT_BLOCK = block_dtype(IQ4_KT)
_IQ4_KT_BYTES = _IQ4_KT_BLOCK.itemsize
_IQ4_KT_GROUP = 4
_SECOND_START = 1 << 15
_IQ4_KT_TRELLIS = Trellis(
    type=IQ4_KT,
    bits=15,
    dim=_IQ4_KT_GROUP,
    levels=np.arange(-64, 64, dtype=np.float32),
    goal=0.0235,
    reach=60,
    trials=tuple(
        (sign * factor, start)
        for factor in (1.0, 1.12, 0.88, 1.06, 0.94)
        for start in (0, 1)
        for sign in (1, -1)
    ),
    kept_nodes=8,
    kept_leaves=1,
    starts=(START, START + _SECOND_START),
    ends_again=True,
)


def _pack_iq4_kt(choices: Choices, _weights: Floats32, out: Bytes) -> None:
    blocks, indices = out.view(_IQ4_KT_BLOCK)[:, 0], choices.indices
    top = (indices >> 12).reshape(-1, 8, 8) << np.arange(8, 32, 3)
    blocks["shb"] = choices.starts | choices.codes << 1 | top.sum(axis=2)
    blocks["ql"] = indices & 0xFF
    upper = indices >> 8 & 0xF
    blocks["qh"] = upper[:, :32] | upper[:, 32:] << 4


@kernel
def _decode_iq4_kt(data: Bytes, scales: Floats32, out: Floats32) -> None:
    """Decode IQ4_KT: 256 weights in 128 bytes, 4 bits each.

    A row starts with d, float32. Then come its blocks. An index of 15 bits is for a group of 4 weights.

        bytes      field
        0 .. 31    shb  32 bits for each sub-block:
                        bit 0         what is added to its indices: 4096 if clear, 36864 if set
                        bits 1 .. 7   its scale s
                        bits 8 .. 31  bits 12 .. 14 of its eight indices
        32 .. 95   ql   bits 0 .. 7 of the 64 indices
        96 .. 127  qh   bits 8 .. 11: byte g holds those of index g in its lower half, of g + 32 in the upper

    The weights of a group are d * (s - 64) times the four levels of `trellis` from its index on.

    Source: block_iq4_kt and dequantize_row_iq4_kt of ik_llama.cpp 8337e4c.
    """
    for row in range(len(out)):
        for k in range(out.shape[1] // SUPER_ELEMS):
            block = data[row, k * _IQ4_KT_BYTES : (k + 1) * _IQ4_KT_BYTES]
            for j in range(8):
                code = block[4 * j]
                top = block[4 * j + 1] | block[4 * j + 2] << 8 | block[4 * j + 3] << 16
                scale = scales[row] * np.float32((code >> 1) - 64)
                start = START + (code & 1) * _SECOND_START
                for g in range(8 * j, 8 * j + 8):
                    index = block[32 + g] | (block[96 + g % 32] >> 4 * (g // 32) & 0xF) << 8
                    index |= (top >> 3 * (g - 8 * j) & 7) << 12
                    walk(index + start, scale, out[row, k * SUPER_ELEMS + _IQ4_KT_GROUP * g :], _IQ4_KT_GROUP)


FORMATS = (
    trellis_format(_IQ1_KT_TRELLIS, _pack_iq1_kt, _decode_iq1_kt),
    trellis_format(_IQ2_KT_TRELLIS, _pack_iq2_kt, _decode_iq2_kt),
    trellis_format(_IQ3_KT_TRELLIS, _pack_iq3_kt, _decode_iq3_kt),
    trellis_format(_IQ4_KT_TRELLIS, _pack_iq4_kt, _decode_iq4_kt),
)
