"""MXFP4 and NVFP4: the sixteen values of a 4-bit float.

    code bits   1 sign  2 exponent  1 fraction
    codes 0 .. 7 stand for 0 1 2 3 4 6 8 12 halves, codes 8 .. 15 for the same with a minus sign

Doubled, the values are integers, and so are stored scales read as half of what they say: a weight is
d * doubled value with d = scale / 2.

ggml's best_index_mxfp4 takes the first of the values with the least error: the one nearer to zero of equals,
and 0 never with a minus sign.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from gguf_tools.format.ggml_types import MXFP4, NVFP4
from quantize.formats.base import Bytes, Floats32, Rows, block_format
from quantize.formats.block_kernels import plain_kernel
from quantize.formats.blocks_of_32.scales import ELEMS
from quantize.simd.floats import HALF, INFINITY, ZERO
from quantize.simd.kernel import inlinable, kernel
from quantize.simd.lane_memory import FloatTile, IntTile, float_tile, gather, int_tile, load, store, tail
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
    shift_right_logical,
    splat,
    to_float,
    to_int,
)
from quantize.simd.packing import pack
from quantize.simd.tiles import first_not_finite, load_blocks, padded_words, store_blocks

DOUBLED = np.array([0, 1, 2, 3, 4, 6, 8, 12], np.float32)
"""Twice the values of codes 0 .. 7."""

_SIGN = 8
_ONE_BITS = 0x3F800000


@inlinable
def doubled_values(codes: Ints) -> Floats:
    """Return twice the values of codes 0 .. 15; code 8 gives 0, not -0."""
    size = codes & 7
    # from code 2 on, exponent and fraction are those of a float32 with another bias
    value = select(size < 2, to_float(size), from_bits((size << 22) + _ONE_BITS))
    return select((codes & _SIGN) != 0, ZERO - value, value)


@inlinable
def nearest_codes(x: FloatTile, start: int, count: int, d: Floats, codes: IntTile) -> None:
    """Fill codes[start : start + count] with the nearest to x / d, for d > 0 and x well below 2**24 * d.

    An edge between two values d * a and d * b is computed so that it is exact, and infinite if d * b is.
    """
    edges = float_tile(7)
    edges[0] = HALF * d
    edges[1] = d + HALF * d
    edges[2] = np.float32(2) * d + HALF * d
    edges[3] = np.float32(3) * d + HALF * d
    edges[4] = np.float32(4) * d + d
    edges[5] = np.float32(8) * d - d
    edges[6] = np.float32(12) * d - np.float32(2) * d
    for i in range(start, start + count):
        code = splat(0)
        for k in range(7):
            code = select(absolute(x[i]) > edges[k], k + 1, code)
        codes[i] = select((code != 0) & (x[i] < ZERO), code | _SIGN, code)


@inlinable
def first_best_codes(x: FloatTile, start: int, count: int, d: Floats, codes: IntTile) -> None:
    """Fill codes[start : start + count] as the reference does, for any x and d.

    Far beyond the largest value all errors are rounded to the same number, and 0 is the first of them.
    """
    for i in range(start, start + count):
        magnitude = absolute(x[i])
        best = magnitude
        code = splat(0)
        for k in range(1, 8):
            error = absolute(DOUBLED[k] * d - magnitude)
            better = error < best
            best = select(better, error, best)
            code = select(better, k, code)
        codes[i] = select((code != 0) & (x[i] < ZERO), code | _SIGN, code)


# ---- MXFP4

_MXFP4_BYTES = MXFP4.block_bytes
_MXFP4_WORDS = padded_words(_MXFP4_BYTES)
_MXFP4_LEAST_NORMAL = np.float32(2.0**-126)
_RAISE = 24
_RAISED = np.float32(2.0**_RAISE)
_LEAST_POWER = -148


def _steps_below(power: int) -> int:
    """Return how many float32 below 2**power, spaced by 2**(power - 24), have a logarithm rounded to `power`.

    That of 2**power * (1 - steps * 2**-24) is power - steps * 2**-24 / ln 2, very nearly.
    """
    if power == 0:
        return 0
    spacing = power - float(np.nextafter(np.float32(power), np.float32(-np.inf)))
    return math.floor(spacing / 2 * math.log(2) * 2**24)


_STEPS_BELOW = np.array([_steps_below(power) for power in range(_LEAST_POWER, 129)], np.int32)


@kernel
def _decode_mxfp4(data: Bytes, out: Floats32) -> None:
    """Decode MXFP4: 32 weights in 17 bytes, 4.25 bits each; the OCP microscaling format with E2M1 elements.

        bytes     field
        0         e   E8M0: the scale is 2**(e - 127)
        1 .. 16   qs  codes q of 4 bits: byte i holds q[i] in its lower half and q[i + 16] in the upper

    weight[i] = 2**(e - 128) * doubled[q[i]], the doubled values of E2M1 being

        0 1 2 3 4 6 8 12  -0 -1 -2 -3 -4 -6 -8 -12

    e = 255 is no NaN here but 2**127. The reference takes e from the rounded float32 logarithm of the block's
    largest magnitude. So one that is a few steps below a power of two counts as that power, and below 2**-125
    its e wraps around to a scale that codes all weights as 0.
    """
    for k in range(data.size // _MXFP4_BYTES):
        start = k * _MXFP4_BYTES
        d = _half_scale_mxfp4(splat(data[start]))
        packed = load(data, start + 1)
        store(out, k * ELEMS, d * doubled_values(packed & 0xF))
        store(out, k * ELEMS + LANES, d * doubled_values(packed >> 4))


@inlinable
def _half_scale_mxfp4(e: Ints) -> Floats:
    """Return 2**(e - 128)."""
    return from_bits(select(e < 2, (e + 1) << 21, (e - 1) << 23))


@inlinable
def _exponent_mxfp4(largest: Floats, steps_below: npt.NDArray[np.int32]) -> Ints:
    """Return e for a block's largest magnitude: the rounded logarithm's integer part + 125, as a byte."""
    subnormal = largest < _MXFP4_LEAST_NORMAL
    pattern = bits(select(subnormal, largest * _RAISED, largest))
    bias = select(subnormal, splat(127 + _RAISE), 127)
    steps = gather(steps_below, (pattern >> 23) - bias + 1 - _LEAST_POWER)
    power = (pattern + steps >> 23) - bias
    return select(largest > ZERO, power + 125 & 0xFF, 0)


@kernel
def _quantize_mxfp4(source: Rows, steps_below: npt.NDArray[np.int32], out: Bytes) -> int:
    x = float_tile(ELEMS)
    codes, words = int_tile(ELEMS), int_tile(_MXFP4_WORDS)
    for first in range(0, out.size // _MXFP4_BYTES, LANES):
        if not load_blocks(source, first, ELEMS, x):
            return first_not_finite(x, ELEMS, first, out.size // _MXFP4_BYTES)
        largest = splat(ZERO)
        for i in range(ELEMS):
            largest = maximum(absolute(x[i]), largest)
        e = _exponent_mxfp4(largest, steps_below)
        nearest_codes(x, 0, ELEMS, _half_scale_mxfp4(e), codes)
        pack(codes, 0, 4, 16, 16, words)
        words[4] = shift_right_logical(words[3], 24)
        for k in range(3, 0, -1):
            words[k] = words[k] << 8 | shift_right_logical(words[k - 1], 24)
        words[0] = words[0] << 8 | e
        store_blocks(words, out, first, _MXFP4_BYTES)
    return -1


# ---- NVFP4

_NVFP4_ELEMS = 64
_NVFP4_SUB_ELEMS = 16
_NVFP4_BYTES = NVFP4.block_bytes
_LARGEST_VALUE = np.float32(6)
_NVFP4_LEAST_NORMAL = np.float32(2.0**-6)
_SUBNORMALS = np.float32(2.0**9)  # of them make 1
_FRACTION_BITS = 3
_REBIAS = 127 - 7
_TOP_EXPONENT = 15
LARGEST_BYTE = 0x7E
_HALF_SUBNORMAL = np.float32(2.0**-10)
_NEAR = np.float32(32)


@kernel
def _decode_nvfp4(words: npt.NDArray[np.int32], out: Floats32) -> None:
    """Decode NVFP4: 64 weights in 36 bytes, 4.5 bits each; E2M1 elements with a scale for every 16.

        bytes       field
        0 .. 3      d   UE4M3, the scale of each sub-block: 4 bits of exponent (bias 7), 3 of fraction
        4 .. 35     qs  codes q of 4 bits: 8 bytes hold 16, the lower halves first (packing.pack)

    The value of weight i = 0 .. 15 in sub-block j = 0 .. 3:

        scale[j] / 2 * doubled[q[16 * j + i]]

    with the doubled values of MXFP4. The scale is (1 + fraction / 8) * 2**(exponent - 7), for exponent 0
    fraction / 8 * 2**-6. The top bit of its byte is not looked at, except that byte 0x7F gives 0 and
    0xFF 480.
    """
    lane = lane_numbers()
    in_first_word = (lane & 4) == 0
    shift = (lane & 3) * 8 + (lane >> 3) * 4
    for k in range(words.size * 4 // _NVFP4_BYTES):
        start = k * _NVFP4_BYTES // 4
        for j in range(4):
            d = _half_scale_nvfp4(splat(words[start] >> 8 * j & 0xFF))
            first, second = splat(words[start + 1 + 2 * j]), splat(words[start + 2 + 2 * j])
            codes = select(in_first_word, first, second) >> shift & 0xF
            store(out, k * _NVFP4_ELEMS + j * LANES, d * doubled_values(codes))


@inlinable
def _half_scale_nvfp4(byte: Ints) -> Floats:
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
def _scale_byte_nvfp4(scale: Floats) -> Ints:
    """Return UE4M3 of a scale that is not negative: rounded half up, 448 if it is 256 or more.

    Subnormals don't round up to the least normal.
    """
    subnormal = minimum(to_int(scale * _SUBNORMALS + HALF), 7)
    rounded = bits(scale) + (1 << 22 - _FRACTION_BITS) >> 23 - _FRACTION_BITS
    normal = rounded - (_REBIAS << _FRACTION_BITS)
    normal = select(normal >= _TOP_EXPONENT << _FRACTION_BITS, LARGEST_BYTE, normal)
    return select(scale < _NVFP4_LEAST_NORMAL, subnormal, normal)


@plain_kernel(NVFP4)
def _quantize_nvfp4(x: FloatTile, words: IntTile) -> None:
    codes = int_tile(_NVFP4_ELEMS)
    scales = splat(0)
    for j in range(4):
        start = j * _NVFP4_SUB_ELEMS
        largest = splat(ZERO)
        for i in range(start, start + _NVFP4_SUB_ELEMS):
            largest = maximum(absolute(x[i]), largest)
        scale = _scale_byte_nvfp4(largest / _LARGEST_VALUE)
        scales |= scale << 8 * j
        d = _half_scale_nvfp4(scale)
        if all_lanes((largest <= _NEAR * d) | (d == ZERO)):
            nearest_codes(x, start, _NVFP4_SUB_ELEMS, select(d == ZERO, INFINITY, d), codes)
        else:
            first_best_codes(x, start, _NVFP4_SUB_ELEMS, d, codes)
    words[0] = scales
    pack(codes, 0, 4, 8, 32, tail(words, 1))


FORMATS = (
    block_format(MXFP4, _decode_mxfp4, _quantize_mxfp4, tables=lambda: (_STEPS_BELOW,)),
    block_format(NVFP4, _decode_nvfp4, _quantize_nvfp4, item=np.int32),
)
