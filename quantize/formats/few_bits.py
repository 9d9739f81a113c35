"""TQ2_0, TQ1_0, Q1_0 and Q2_0: for models trained in one or two bits."""

from __future__ import annotations

import numpy as np

from gguf_tools.format.ggml_types import Q1_0, Q2_0, TQ1_0, TQ2_0
from quantize.formats.base import Bytes, Floats32, block_format
from quantize.formats.block_kernels import plain_kernel
from quantize.simd.floats import HALF, INFINITY, ONE, ZERO, float_at, to_half_bits
from quantize.simd.kernel import inlinable, kernel
from quantize.simd.lane_memory import FloatTile, IntTile, int_tile, load, store, tail
from quantize.simd.lanes import (
    LANES,
    Floats,
    Ints,
    absolute,
    bits,
    from_bits,
    lane_numbers,
    maximum,
    select,
    splat,
    to_float,
)
from quantize.simd.packing import pack, prepend_half

_TERNARY_ELEMS = 256

# ---- TQ2_0

_TQ2_0_BYTES = TQ2_0.block_bytes


@kernel
def _decode_tq2_0(data: Bytes, out: Floats32) -> None:
    """Decode TQ2_0: 256 weights in 66 bytes, 2.0625 bits each, for weights that are -1, 0 or 1 times a scale.

        bytes       field
        0 .. 63     qs  codes q of 2 bits: 32 bytes hold 128, the lowest bits first (packing.pack)
        64 .. 65    d   float16

    weight[i] = d * (q[i] - 1)

    The encoder makes codes 0 .. 2 only; d is the largest magnitude.
    """
    for k in range(data.size // _TQ2_0_BYTES):
        start = k * _TQ2_0_BYTES
        d = float_at(data, start + 64)
        for byte in range(0, 64, LANES):
            packed = load(data, start + byte)
            first = k * _TERNARY_ELEMS + byte // 32 * 128 + byte % 32
            for n in range(4):
                store(out, first + 32 * n, d * to_float((packed >> 2 * n & 3) - 1))


@inlinable
def _ternary_codes(x: FloatTile, codes: IntTile) -> Ints:
    """Fill 256 codes, 0 .. 2, and return the bits of d; a half of d and more counts as d.

    Where 1 / d overflows, the reference converts infinities and NaN to integers and gets code 1.
    """
    d = splat(ZERO)
    for i in range(_TERNARY_ELEMS):
        d = maximum(d, absolute(x[i]))
    inverse = ONE / d
    inverse = select(inverse == INFINITY, ZERO, inverse)
    for i in range(_TERNARY_ELEMS):
        scaled = x[i] * inverse
        code = select(scaled >= HALF, splat(2), 1)
        codes[i] = select(scaled <= -HALF, 0, code)
    return to_half_bits(d)


@plain_kernel(TQ2_0)
def _quantize_tq2_0(x: FloatTile, words: IntTile) -> None:
    codes = int_tile(_TERNARY_ELEMS)
    words[16] = _ternary_codes(x, codes)
    pack(codes, 0, 2, 32, 64, words)


# ---- TQ1_0

_TQ1_0_BYTES = TQ1_0.block_bytes
_DIGITS = 5


@kernel
def _decode_tq1_0(data: Bytes, out: Floats32) -> None:
    """Decode TQ1_0: 256 weights in 54 bytes, 1.6875 bits each, for weights that are -1, 0 or 1 times a scale.

        bytes       field
        0 .. 47     qs  five codes q, 0 .. 2, a byte: byte i = 0 .. 31 holds weights i + 32 * n, n = 0 .. 4,
                        and byte 32 + i, i = 0 .. 15, weights 160 + i + 16 * n
        48 .. 51    qh  four codes a byte: byte i holds weights 240 + i + 4 * n
        52 .. 53    d   float16

    weight = d * (q - 1)

    A byte is a fraction of 256 whose digits to the base 3 are the codes, the first one the most significant,
    rounded up: a reader multiplies by 3**n, keeps 8 bits, and finds code n in the whole part of 3 / 256 of
    it.
    """
    lane = lane_numbers()
    for k in range(data.size // _TQ1_0_BYTES):
        start = k * _TQ1_0_BYTES
        first = k * _TERNARY_ELEMS
        d = float_at(data, start + 52)
        for half in range(0, 32, LANES):
            packed = load(data, start + half)
            for n in range(_DIGITS):
                store(out, first + half + 32 * n, d * _weight(packed))
                packed = packed * 3 & 0xFF
        packed = load(data, start + 32)
        for n in range(_DIGITS):
            store(out, first + 160 + 16 * n, d * _weight(packed))
            packed = packed * 3 & 0xFF
        word = data[start + 48] | data[start + 49] << 8 | data[start + 50] << 16 | data[start + 51] << 24
        packed = (splat(word) >> 8 * (lane & 3)) & 0xFF
        digit = lane >> 2
        for n in range(1, 4):
            packed = select(digit >= n, packed * 3 & 0xFF, packed)
        store(out, first + 240, d * _weight(packed))


@inlinable
def _weight(packed: Ints) -> Floats:
    """Return the first code of bytes, less 1."""
    return to_float((packed * 3 >> 8) - 1)


@plain_kernel(TQ1_0)
def _quantize_tq1_0(x: FloatTile, words: IntTile) -> None:
    codes = int_tile(_TERNARY_ELEMS)
    words[13] = _ternary_codes(x, codes)
    _pack_digits(codes, 5, 32, words)
    _pack_digits(tail(codes, 160), 5, 16, tail(words, 8))
    _pack_digits(tail(codes, 240), 4, 4, tail(words, 12))


@inlinable
def _pack_digits(codes: IntTile, digits: int, n_bytes: int, words: IntTile) -> None:
    """Fill n_bytes of words; digit n of byte i is code i + n_bytes * n, digits beyond `digits` are 0."""
    for word in range(n_bytes // 4):
        packed = splat(0)
        for byte in range(4):
            number = splat(0)
            for n in range(digits):
                number = number * 3 + codes[4 * word + byte + n_bytes * n]
            for _ in range(digits, _DIGITS):
                number *= 3
            packed |= _round_up(number) << 8 * byte
        words[word] = packed


@inlinable
def _round_up(number: Ints) -> Ints:
    """Return number * 256 / 3**5, rounded up, for number < 3**5; 270 / 2**16 is a little above 1 / 3**5."""
    return number + ((13 * number + 242) * 270 >> 16)


# ---- Q1_0

_Q1_0_ELEMS = 128
_Q1_0_BYTES = Q1_0.block_bytes
_QUIET = 0x00400000


@kernel
def _decode_q1_0(data: Bytes, out: Floats32) -> None:
    """Decode Q1_0: 128 weights in 18 bytes, 1.125 bits each: the sign of a weight, and the mean magnitude.

        bytes     field
        0 .. 1    d   float16
        2 .. 17   qs  codes q of 1 bit: bit i % 8 of byte i // 8 is q[i]

    weight[i] = d if q[i] else -d
    """
    bit = splat(1) << lane_numbers()
    for k in range(data.size // _Q1_0_BYTES):
        start = k * _Q1_0_BYTES
        d = _quiet(float_at(data, start))
        for i in range(_Q1_0_ELEMS // LANES):
            word = data[start + 2 + 2 * i] | data[start + 3 + 2 * i] << 8
            store(out, k * _Q1_0_ELEMS + i * LANES, select((bit & word) != 0, splat(d), -d))


@inlinable
def _quiet(value: np.float32) -> np.float32:
    """Return `value`; a signalling NaN as the quiet one that the reference's conversion of halves makes."""
    return select(value == value, value, from_bits(bits(value) | _QUIET))


@plain_kernel(Q1_0)
def _quantize_q1_0(x: FloatTile, words: IntTile) -> None:
    total = splat(ZERO)
    for i in range(_Q1_0_ELEMS):
        total += absolute(x[i])
    for k in range(4):
        word = splat(0)
        for i in range(32):
            word |= select(x[32 * k + i] >= ZERO, splat(1), 0) << i
        words[k] = word
    prepend_half(to_half_bits(total / np.float32(_Q1_0_ELEMS)), words, 4)


# ---- Q2_0

_Q2_0_ELEMS = 64
_Q2_0_BYTES = Q2_0.block_bytes


@kernel
def _decode_q2_0(data: Bytes, out: Floats32) -> None:
    """Decode Q2_0: 64 weights in 18 bytes, 2.25 bits each.

        bytes     field
        0 .. 1    d   float16
        2 .. 17   qs  codes q of 2 bits: byte i holds q[4 * i] .. q[4 * i + 3], the first in the lowest bits

    weight[i] = d * (q[i] - 1)

    The encoder makes codes 0 .. 2 only; d is the largest magnitude.
    """
    shift = 2 * lane_numbers()
    for k in range(data.size // _Q2_0_BYTES):
        start = k * _Q2_0_BYTES
        d = float_at(data, start)
        for i in range(_Q2_0_ELEMS // LANES):
            at = start + 2 + 4 * i
            word = data[at] | data[at + 1] << 8 | data[at + 2] << 16 | data[at + 3] << 24
            store(out, k * _Q2_0_ELEMS + i * LANES, d * to_float((splat(word) >> shift & 3) - 1))


@plain_kernel(Q2_0)
def _quantize_q2_0(x: FloatTile, words: IntTile) -> None:
    d = splat(ZERO)
    for i in range(_Q2_0_ELEMS):
        d = maximum(absolute(x[i]), d)
    inverse = ONE / d
    # where 1 / d overflows, the reference converts infinities and NaN to integers and gets code 0
    infinite = (inverse == INFINITY) & (d > ZERO)
    inverse = select(inverse == INFINITY, ZERO, inverse)
    middle = select(infinite, splat(0), 1)
    for k in range(4):
        word = splat(0)
        for i in range(16):
            scaled = x[16 * k + i] * inverse
            code = select(scaled >= HALF, splat(2), middle)
            word |= select(scaled <= -HALF, 0, code) << 2 * i
        words[k] = word
    prepend_half(to_half_bits(d), words, 4)


FORMATS = (
    block_format(TQ2_0, _decode_tq2_0, _quantize_tq2_0),
    block_format(TQ1_0, _decode_tq1_0, _quantize_tq1_0),
    block_format(Q1_0, _decode_q1_0, _quantize_q1_0),
    block_format(Q2_0, _decode_q2_0, _quantize_q2_0),
)
