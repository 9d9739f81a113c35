"""NVFP4: 64 weights in 36 bytes, 4.5 bits each; E2M1 elements with a scale for every 16.

    bytes       field
    0 .. 3      d   UE4M3, the scale of each sub-block: 4 bits of exponent (bias 7), 3 of fraction
    4 .. 35     qs  codes q of 4 bits: 8 bytes hold 16, the lower halves first (packing.pack)

The value of weight i = 0 .. 15 in sub-block j = 0 .. 3:

    scale[j] / 2 * doubled[q[16 * j + i]]

with the doubled values of MXFP4. The scale is (1 + fraction / 8) * 2**(exponent - 7), for exponent 0
fraction / 8 * 2**-6. The top bit of its byte is not looked at, except that byte 0x7F gives 0 and 0xFF 480.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from gguf_tools.format.ggml_types import NVFP4
from quantize.formats.base import Floats32, Rows, block_dtype, block_format
from quantize.formats.fp4.codes import doubled_values, first_best_codes, nearest_codes
from quantize.simd.floats import HALF, INFINITY, ZERO
from quantize.simd.kernel import inlinable, kernel
from quantize.simd.lane_memory import float_tile, int_tile, store, tail
from quantize.simd.lanes import (
    LANES,
    Floats,
    Ints,
    absolute,
    all_lanes,
    bits,
    from_bits,
    lane_numbers,
    maximum,
    minimum,
    select,
    splat,
    to_float,
    to_int,
)
from quantize.simd.packing import pack
from quantize.simd.tiles import first_not_finite, load_blocks, padded_words, store_blocks

BLOCK = block_dtype(NVFP4)
_ELEMS = 64
_SUB_ELEMS = 16
_BYTES = BLOCK.itemsize
_WORDS = padded_words(_BYTES)

_LARGEST_VALUE = np.float32(6)
_LEAST_NORMAL = np.float32(2.0**-6)
_SUBNORMALS = np.float32(2.0**9)  # of them make 1
_FRACTION_BITS = 3
_REBIAS = 127 - 7
_TOP_EXPONENT = 15
LARGEST_BYTE = 0x7E
_HALF_SUBNORMAL = np.float32(2.0**-10)
_NEAR = np.float32(32)


@kernel
def _decode(words: npt.NDArray[np.int32], out: npt.NDArray[np.float32]) -> None:
    lane = lane_numbers()
    in_first_word = (lane & 4) == 0
    shift = (lane & 3) * 8 + (lane >> 3) * 4
    for k in range(words.size * 4 // _BYTES):
        start = k * _BYTES // 4
        for j in range(4):
            d = _half_scale(splat(words[start] >> 8 * j & 0xFF))
            first, second = splat(words[start + 1 + 2 * j]), splat(words[start + 2 + 2 * j])
            codes = select(in_first_word, first, second) >> shift & 0xF
            store(out, k * _ELEMS + j * LANES, d * doubled_values(codes))


@inlinable
def _half_scale(byte: Ints) -> Floats:
    """Return half of what a UE4M3 byte says."""
    normal = from_bits(((byte & 0x7F) << 23 - _FRACTION_BITS) + (_REBIAS - 1 << 23))
    value = select((byte & 0x78) == 0, to_float(byte & 7) * _HALF_SUBNORMAL, normal)
    return select(byte == 0x7F, ZERO, value)


def half_scales(data: npt.NDArray[np.integer[Any]]) -> Floats32:
    """Return half of what UE4M3 bytes say, outside of kernels."""
    exponent, fraction = data >> _FRACTION_BITS & 0xF, (data & 7).astype(np.float32)
    subnormal = fraction * _HALF_SUBNORMAL
    normal = np.ldexp(1 + fraction / np.float32(8), exponent - 8)
    values: Floats32 = np.where(exponent == 0, subnormal, normal)
    return np.where(data == 0x7F, ZERO, values)


@inlinable
def _scale_byte(scale: Floats) -> Ints:
    """Return UE4M3 of a scale that is not negative: rounded half up, 448 if it is 256 or more.

    Subnormals don't round up to the least normal.
    """
    subnormal = minimum(to_int(scale * _SUBNORMALS + HALF), 7)
    rounded = bits(scale) + (1 << 22 - _FRACTION_BITS) >> 23 - _FRACTION_BITS
    normal = rounded - (_REBIAS << _FRACTION_BITS)
    normal = select(normal >= _TOP_EXPONENT << _FRACTION_BITS, LARGEST_BYTE, normal)
    return select(scale < _LEAST_NORMAL, subnormal, normal)


@kernel
def _quantize(source: Rows, out: npt.NDArray[np.uint8]) -> int:
    x = float_tile(_ELEMS)
    codes, words = int_tile(_ELEMS), int_tile(_WORDS)
    for first in range(0, out.size // _BYTES, LANES):
        if not load_blocks(source, first, _ELEMS, x):
            return first_not_finite(x, _ELEMS, first, out.size // _BYTES)
        scales = splat(0)
        for j in range(4):
            start = j * _SUB_ELEMS
            largest = splat(ZERO)
            for i in range(start, start + _SUB_ELEMS):
                largest = maximum(absolute(x[i]), largest)
            scale = _scale_byte(largest / _LARGEST_VALUE)
            scales |= scale << 8 * j
            d = _half_scale(scale)
            if all_lanes((largest <= _NEAR * d) | (d == ZERO)):
                nearest_codes(x, start, _SUB_ELEMS, select(d == ZERO, INFINITY, d), codes)
            else:
                first_best_codes(x, start, _SUB_ELEMS, d, codes)
        words[0] = scales
        pack(codes, 0, 4, 8, 32, tail(words, 1))
        store_blocks(words, out, first, _BYTES)
    return -1


FORMAT = block_format(NVFP4, _decode, _quantize, item=np.int32)
