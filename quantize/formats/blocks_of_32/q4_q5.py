"""Q4_0, Q5_0, Q4_1 and Q5_1: codes of 4 or 5 bits; around zero, or from a minimum."""

from __future__ import annotations

import numpy as np

from gguf_tools.format.ggml_types import Q4_0, Q4_1, Q5_0, Q5_1
from quantize.formats.base import Bytes, Floats32, block_format
from quantize.formats.block_kernels import plain_kernel
from quantize.formats.blocks_of_32.scales import (
    ELEMS,
    add_minimum,
    fifth_bits,
    fifth_bits_at,
    fit_range,
    fit_symmetric,
    row_weighted_kernel,
)
from quantize.formats.search import search_affine, search_symmetric
from quantize.simd.floats import ZERO, clamp, float_at, nearest_int, to_half_bits
from quantize.simd.kernel import inlinable, kernel
from quantize.simd.lane_memory import FloatTile, IntTile, int_tile, load, store, tail
from quantize.simd.lanes import LANES, Floats, select, to_float
from quantize.simd.packing import pack, prepend_half

# ---- Q4_0

Q4_0_HALF = 8
Q4_0_BYTES = Q4_0.block_bytes


@kernel
def _decode_q4_0(data: Bytes, out: Floats32) -> None:
    """Decode Q4_0: 32 weights in 18 bytes, 4.5 bits each.

        bytes     field
        0 .. 1    d   float16
        2 .. 17   qs  codes q of 4 bits: byte i holds q[i] in its lower half and q[i + 16] in the upper

    weight[i] = d * (q[i] - 8)
    """
    for k in range(data.size // Q4_0_BYTES):
        start = k * Q4_0_BYTES
        d = float_at(data, start)
        packed = load(data, start + 2)
        store(out, k * ELEMS, d * to_float((packed & 0xF) - Q4_0_HALF))
        store(out, k * ELEMS + LANES, d * to_float((packed >> 4) - Q4_0_HALF))


@plain_kernel(Q4_0)
def _quantize_plain_q4_0(x: FloatTile, words: IntTile) -> None:
    codes = int_tile(ELEMS)
    pack_q4_0(fit_symmetric(x, Q4_0_HALF, codes), codes, words)


@row_weighted_kernel(Q4_0)
def _quantize_weighted_q4_0(x: FloatTile, weights: FloatTile, words: IntTile) -> None:
    codes = int_tile(ELEMS)
    d, inverse = search_symmetric(x, weights, ELEMS, Q4_0_HALF)
    for i in range(ELEMS):
        code = clamp(nearest_int(inverse * x[i]), -Q4_0_HALF, Q4_0_HALF - 1) + Q4_0_HALF
        codes[i] = select(inverse == ZERO, 0, code)
    pack_q4_0(d, codes, words)


@inlinable
def pack_q4_0(d: Floats, codes: IntTile, words: IntTile) -> None:
    pack(codes, 0, 4, 16, 16, words)
    prepend_half(to_half_bits(d), words, 4)


# ---- Q5_0

_Q5_0_HALF = 16
_Q5_0_BYTES = Q5_0.block_bytes


@kernel
def _decode_q5_0(data: Bytes, out: Floats32) -> None:
    """Decode Q5_0: 32 weights in 22 bytes, 5.5 bits each.

        bytes     field
        0 .. 1    d   float16
        2 .. 5    qh  bit i is the highest of the 5 bits of code q[i]
        6 .. 21   qs  the other 4: byte i holds those of q[i] in its lower half, of q[i + 16] in the upper

    weight[i] = d * (q[i] - 16)
    """
    for k in range(data.size // _Q5_0_BYTES):
        start = k * _Q5_0_BYTES
        d = float_at(data, start)
        packed = load(data, start + 6)
        lower = packed & 0xF | fifth_bits_at(data, start + 2, 0)
        upper = packed >> 4 | fifth_bits_at(data, start + 2, LANES)
        store(out, k * ELEMS, d * to_float(lower - _Q5_0_HALF))
        store(out, k * ELEMS + LANES, d * to_float(upper - _Q5_0_HALF))


@plain_kernel(Q5_0)
def _quantize_plain_q5_0(x: FloatTile, words: IntTile) -> None:
    codes = int_tile(ELEMS)
    _pack_q5_0(fit_symmetric(x, _Q5_0_HALF, codes), codes, words)


@row_weighted_kernel(Q5_0)
def _quantize_weighted_q5_0(x: FloatTile, weights: FloatTile, words: IntTile) -> None:
    codes = int_tile(ELEMS)
    d, inverse = search_symmetric(x, weights, ELEMS, _Q5_0_HALF)
    for i in range(ELEMS):
        code = clamp(nearest_int(inverse * x[i]), -_Q5_0_HALF, _Q5_0_HALF - 1) + _Q5_0_HALF
        codes[i] = select(inverse == ZERO, 0, code)
    _pack_q5_0(d, codes, words)


@inlinable
def _pack_q5_0(d: Floats, codes: IntTile, words: IntTile) -> None:
    words[0] = fifth_bits(codes)
    pack(codes, 0, 4, 16, 16, tail(words, 1))
    prepend_half(to_half_bits(d), words, 5)


# ---- Q4_1

Q4_1_TOP = 15
Q4_1_BYTES = Q4_1.block_bytes


@kernel
def _decode_q4_1(data: Bytes, out: Floats32) -> None:
    """Decode Q4_1: 32 weights in 20 bytes, 5 bits each.

        bytes     field
        0 .. 1    d   float16
        2 .. 3    m   float16
        4 .. 19   qs  codes q of 4 bits: byte i holds q[i] in its lower half and q[i + 16] in the upper

    weight[i] = d * q[i] + m
    """
    for k in range(data.size // Q4_1_BYTES):
        start = k * Q4_1_BYTES
        d = float_at(data, start)
        m = float_at(data, start + 2)
        packed = load(data, start + 4)
        store(out, k * ELEMS, add_minimum(d * to_float(packed & 0xF), m))
        store(out, k * ELEMS + LANES, add_minimum(d * to_float(packed >> 4), m))


@plain_kernel(Q4_1)
def _quantize_plain_q4_1(x: FloatTile, words: IntTile) -> None:
    codes = int_tile(ELEMS)
    d, m = fit_range(x, Q4_1_TOP, codes)
    pack_q4_1(d, m, codes, words)


@row_weighted_kernel(Q4_1)
def _quantize_weighted_q4_1(x: FloatTile, weights: FloatTile, words: IntTile) -> None:
    codes = int_tile(ELEMS)
    d, minus_m, inverse, code_m = search_affine(
        x, weights, ELEMS, Q4_1_TOP, np.float32(-0.9), np.float32(0.05), 36
    )
    for i in range(ELEMS):
        codes[i] = clamp(nearest_int(inverse * (x[i] - code_m)), 0, Q4_1_TOP)
    pack_q4_1(d, -minus_m, codes, words)


@inlinable
def pack_q4_1(d: Floats, m: Floats, codes: IntTile, words: IntTile) -> None:
    words[0] = to_half_bits(d) | to_half_bits(m) << 16
    pack(codes, 0, 4, 16, 16, tail(words, 1))


# ---- Q5_1

_Q5_1_TOP = 31
_Q5_1_BYTES = Q5_1.block_bytes


@kernel
def _decode_q5_1(data: Bytes, out: Floats32) -> None:
    """Decode Q5_1: 32 weights in 24 bytes, 6 bits each.

        bytes     field
        0 .. 1    d   float16
        2 .. 3    m   float16
        4 .. 7    qh  bit i is the highest of the 5 bits of code q[i]
        8 .. 23   qs  the other 4: byte i holds those of q[i] in its lower half, of q[i + 16] in the upper

    weight[i] = d * q[i] + m
    """
    for k in range(data.size // _Q5_1_BYTES):
        start = k * _Q5_1_BYTES
        d = float_at(data, start)
        m = float_at(data, start + 2)
        packed = load(data, start + 8)
        lower = packed & 0xF | fifth_bits_at(data, start + 4, 0)
        upper = packed >> 4 | fifth_bits_at(data, start + 4, LANES)
        store(out, k * ELEMS, add_minimum(d * to_float(lower), m))
        store(out, k * ELEMS + LANES, add_minimum(d * to_float(upper), m))


@plain_kernel(Q5_1)
def _quantize_plain_q5_1(x: FloatTile, words: IntTile) -> None:
    codes = int_tile(ELEMS)
    d, m = fit_range(x, _Q5_1_TOP, codes)
    _pack_q5_1(d, m, codes, words)


@row_weighted_kernel(Q5_1)
def _quantize_weighted_q5_1(x: FloatTile, weights: FloatTile, words: IntTile) -> None:
    codes = int_tile(ELEMS)
    d, minus_m, inverse, code_m = search_affine(
        x, weights, ELEMS, _Q5_1_TOP, np.float32(-0.9), np.float32(0.05), 36
    )
    for i in range(ELEMS):
        codes[i] = clamp(nearest_int(inverse * (x[i] - code_m)), 0, _Q5_1_TOP)
    _pack_q5_1(d, -minus_m, codes, words)


@inlinable
def _pack_q5_1(d: Floats, m: Floats, codes: IntTile, words: IntTile) -> None:
    words[0] = to_half_bits(d) | to_half_bits(m) << 16
    words[1] = fifth_bits(codes)
    pack(codes, 0, 4, 16, 16, tail(words, 2))


FORMATS = (
    block_format(Q4_0, _decode_q4_0, _quantize_plain_q4_0, _quantize_weighted_q4_0),
    block_format(Q5_0, _decode_q5_0, _quantize_plain_q5_0, _quantize_weighted_q5_0),
    block_format(Q4_1, _decode_q4_1, _quantize_plain_q4_1, _quantize_weighted_q4_1),
    block_format(Q5_1, _decode_q5_1, _quantize_plain_q5_1, _quantize_weighted_q5_1),
)
