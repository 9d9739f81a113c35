"""Q4_0, Q5_0, Q4_1 and Q5_1: codes of 4 or 5 bits; around zero, or from a minimum."""

from __future__ import annotations

import numpy as np

from gguf_tools.format.ggml_types import Q4_0, Q4_1, Q5_0, Q5_1
from quantize.formats.base import Bytes, Floats32, Rows, block_format
from quantize.formats.blocks_of_32.scales import (
    ELEMS,
    add_minimum,
    fifth_bits,
    fifth_bits_at,
    fit_range,
    fit_symmetric,
    load_weighted,
    row_mean_squares,
)
from quantize.formats.search import search_affine, search_symmetric
from quantize.simd.floats import ZERO, clamp, float_at, nearest_int, to_half_bits
from quantize.simd.kernel import inlinable, kernel
from quantize.simd.lane_memory import IntTile, float_tile, int_tile, load, store, tail
from quantize.simd.lanes import LANES, Floats, select, to_float
from quantize.simd.packing import pack, prepend_half
from quantize.simd.tiles import first_not_finite, load_blocks, padded_words, store_blocks

# ---- Q4_0

Q4_0_HALF = 8
Q4_0_BYTES = Q4_0.block_bytes
Q4_0_WORDS = padded_words(Q4_0_BYTES)


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


@kernel
def _quantize_plain_q4_0(source: Rows, out: Bytes) -> int:
    x = float_tile(ELEMS)
    codes, words = int_tile(ELEMS), int_tile(Q4_0_WORDS)
    for first in range(0, out.size // Q4_0_BYTES, LANES):
        if not load_blocks(source, first, ELEMS, x):
            return first_not_finite(x, ELEMS, first, out.size // Q4_0_BYTES)
        d = fit_symmetric(x, Q4_0_HALF, codes)
        store_q4_0(d, codes, words, out, first)
    return -1


@kernel
def _quantize_weighted_q4_0(source: Rows, importances: Floats32, out: Bytes) -> int:
    x, weights = float_tile(ELEMS), float_tile(ELEMS)
    codes, words = int_tile(ELEMS), int_tile(Q4_0_WORDS)
    means = row_mean_squares(source, importances.size)
    for first in range(0, out.size // Q4_0_BYTES, LANES):
        if not load_weighted(source, importances, means, first, x, weights):
            return first_not_finite(x, ELEMS, first, out.size // Q4_0_BYTES)
        d, inverse = search_symmetric(x, weights, ELEMS, Q4_0_HALF)
        for i in range(ELEMS):
            code = clamp(nearest_int(inverse * x[i]), -Q4_0_HALF, Q4_0_HALF - 1) + Q4_0_HALF
            codes[i] = select(inverse == ZERO, 0, code)
        store_q4_0(d, codes, words, out, first)
    return -1


@inlinable
def store_q4_0(d: Floats, codes: IntTile, words: IntTile, out: Bytes, first: int) -> None:
    pack(codes, 0, 4, 16, 16, words)
    prepend_half(to_half_bits(d), words, 4)
    store_blocks(words, out, first, Q4_0_BYTES)


# ---- Q5_0

_Q5_0_HALF = 16
_Q5_0_BYTES = Q5_0.block_bytes
_Q5_0_WORDS = padded_words(_Q5_0_BYTES)


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


@kernel
def _quantize_plain_q5_0(source: Rows, out: Bytes) -> int:
    x = float_tile(ELEMS)
    codes, words = int_tile(ELEMS), int_tile(_Q5_0_WORDS)
    for first in range(0, out.size // _Q5_0_BYTES, LANES):
        if not load_blocks(source, first, ELEMS, x):
            return first_not_finite(x, ELEMS, first, out.size // _Q5_0_BYTES)
        d = fit_symmetric(x, _Q5_0_HALF, codes)
        _store_q5_0(d, codes, words, out, first)
    return -1


@kernel
def _quantize_weighted_q5_0(source: Rows, importances: Floats32, out: Bytes) -> int:
    x, weights = float_tile(ELEMS), float_tile(ELEMS)
    codes, words = int_tile(ELEMS), int_tile(_Q5_0_WORDS)
    means = row_mean_squares(source, importances.size)
    for first in range(0, out.size // _Q5_0_BYTES, LANES):
        if not load_weighted(source, importances, means, first, x, weights):
            return first_not_finite(x, ELEMS, first, out.size // _Q5_0_BYTES)
        d, inverse = search_symmetric(x, weights, ELEMS, _Q5_0_HALF)
        for i in range(ELEMS):
            code = clamp(nearest_int(inverse * x[i]), -_Q5_0_HALF, _Q5_0_HALF - 1) + _Q5_0_HALF
            codes[i] = select(inverse == ZERO, 0, code)
        _store_q5_0(d, codes, words, out, first)
    return -1


@inlinable
def _store_q5_0(d: Floats, codes: IntTile, words: IntTile, out: Bytes, first: int) -> None:
    words[0] = fifth_bits(codes)
    pack(codes, 0, 4, 16, 16, tail(words, 1))
    prepend_half(to_half_bits(d), words, 5)
    store_blocks(words, out, first, _Q5_0_BYTES)


# ---- Q4_1

_Q4_1_TOP = 15
_Q4_1_BYTES = Q4_1.block_bytes
_Q4_1_WORDS = padded_words(_Q4_1_BYTES)


@kernel
def _decode_q4_1(data: Bytes, out: Floats32) -> None:
    """Decode Q4_1: 32 weights in 20 bytes, 5 bits each.

        bytes     field
        0 .. 1    d   float16
        2 .. 3    m   float16
        4 .. 19   qs  codes q of 4 bits: byte i holds q[i] in its lower half and q[i + 16] in the upper

    weight[i] = d * q[i] + m
    """
    for k in range(data.size // _Q4_1_BYTES):
        start = k * _Q4_1_BYTES
        d = float_at(data, start)
        m = float_at(data, start + 2)
        packed = load(data, start + 4)
        store(out, k * ELEMS, add_minimum(d * to_float(packed & 0xF), m))
        store(out, k * ELEMS + LANES, add_minimum(d * to_float(packed >> 4), m))


@kernel
def _quantize_plain_q4_1(source: Rows, out: Bytes) -> int:
    x = float_tile(ELEMS)
    codes, words = int_tile(ELEMS), int_tile(_Q4_1_WORDS)
    for first in range(0, out.size // _Q4_1_BYTES, LANES):
        if not load_blocks(source, first, ELEMS, x):
            return first_not_finite(x, ELEMS, first, out.size // _Q4_1_BYTES)
        d, m = fit_range(x, _Q4_1_TOP, codes)
        _store_q4_1(d, m, codes, words, out, first)
    return -1


@kernel
def _quantize_weighted_q4_1(source: Rows, importances: Floats32, out: Bytes) -> int:
    x, weights = float_tile(ELEMS), float_tile(ELEMS)
    codes, words = int_tile(ELEMS), int_tile(_Q4_1_WORDS)
    means = row_mean_squares(source, importances.size)
    for first in range(0, out.size // _Q4_1_BYTES, LANES):
        if not load_weighted(source, importances, means, first, x, weights):
            return first_not_finite(x, ELEMS, first, out.size // _Q4_1_BYTES)
        d, minus_m, inverse, code_m = search_affine(
            x, weights, ELEMS, _Q4_1_TOP, np.float32(-0.9), np.float32(0.05), 36
        )
        for i in range(ELEMS):
            codes[i] = clamp(nearest_int(inverse * (x[i] - code_m)), 0, _Q4_1_TOP)
        _store_q4_1(d, -minus_m, codes, words, out, first)
    return -1


@inlinable
def _store_q4_1(d: Floats, m: Floats, codes: IntTile, words: IntTile, out: Bytes, first: int) -> None:
    words[0] = to_half_bits(d) | to_half_bits(m) << 16
    pack(codes, 0, 4, 16, 16, tail(words, 1))
    store_blocks(words, out, first, _Q4_1_BYTES)


# ---- Q5_1

_Q5_1_TOP = 31
_Q5_1_BYTES = Q5_1.block_bytes
_Q5_1_WORDS = padded_words(_Q5_1_BYTES)


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


@kernel
def _quantize_plain_q5_1(source: Rows, out: Bytes) -> int:
    x = float_tile(ELEMS)
    codes, words = int_tile(ELEMS), int_tile(_Q5_1_WORDS)
    for first in range(0, out.size // _Q5_1_BYTES, LANES):
        if not load_blocks(source, first, ELEMS, x):
            return first_not_finite(x, ELEMS, first, out.size // _Q5_1_BYTES)
        d, m = fit_range(x, _Q5_1_TOP, codes)
        _store_q5_1(d, m, codes, words, out, first)
    return -1


@kernel
def _quantize_weighted_q5_1(source: Rows, importances: Floats32, out: Bytes) -> int:
    x, weights = float_tile(ELEMS), float_tile(ELEMS)
    codes, words = int_tile(ELEMS), int_tile(_Q5_1_WORDS)
    means = row_mean_squares(source, importances.size)
    for first in range(0, out.size // _Q5_1_BYTES, LANES):
        if not load_weighted(source, importances, means, first, x, weights):
            return first_not_finite(x, ELEMS, first, out.size // _Q5_1_BYTES)
        d, minus_m, inverse, code_m = search_affine(
            x, weights, ELEMS, _Q5_1_TOP, np.float32(-0.9), np.float32(0.05), 36
        )
        for i in range(ELEMS):
            codes[i] = clamp(nearest_int(inverse * (x[i] - code_m)), 0, _Q5_1_TOP)
        _store_q5_1(d, -minus_m, codes, words, out, first)
    return -1


@inlinable
def _store_q5_1(d: Floats, m: Floats, codes: IntTile, words: IntTile, out: Bytes, first: int) -> None:
    words[0] = to_half_bits(d) | to_half_bits(m) << 16
    words[1] = fifth_bits(codes)
    pack(codes, 0, 4, 16, 16, tail(words, 2))
    store_blocks(words, out, first, _Q5_1_BYTES)


FORMATS = (
    block_format(Q4_0, _decode_q4_0, _quantize_plain_q4_0, _quantize_weighted_q4_0),
    block_format(Q5_0, _decode_q5_0, _quantize_plain_q5_0, _quantize_weighted_q5_0),
    block_format(Q4_1, _decode_q4_1, _quantize_plain_q4_1, _quantize_weighted_q4_1),
    block_format(Q5_1, _decode_q5_1, _quantize_plain_q5_1, _quantize_weighted_q5_1),
)
