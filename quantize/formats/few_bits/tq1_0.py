"""TQ1_0: 256 weights in 54 bytes, 1.6875 bits each; for models whose weights are -1, 0 or 1 times a scale.

    bytes       field
    0 .. 47     qs  five codes q, 0 .. 2, a byte: byte i = 0 .. 31 holds weights i + 32 * n, n = 0 .. 4, and
                    byte 32 + i, i = 0 .. 15, weights 160 + i + 16 * n
    48 .. 51    qh  four codes a byte: byte i holds weights 240 + i + 4 * n
    52 .. 53    d   float16

weight = d * (q - 1)

A byte is a fraction of 256 whose digits to the base 3 are the codes, the first one the most significant,
rounded up: a reader multiplies by 3**n, keeps 8 bits, and finds code n in the whole part of 3 / 256 of it.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from gguf_tools.format.ggml_types import TQ1_0
from quantize.formats.base import Rows, block_dtype, block_format
from quantize.formats.few_bits.tq2_0 import ternary_codes
from quantize.simd.floats import float_at
from quantize.simd.kernel import inlinable, kernel
from quantize.simd.lane_memory import IntTile, float_tile, int_tile, load, store, tail
from quantize.simd.lanes import LANES, Floats, Ints, lane_numbers, select, splat, to_float
from quantize.simd.tiles import first_not_finite, load_blocks, padded_words, store_blocks

BLOCK = block_dtype(TQ1_0)
_ELEMS = 256
_BYTES = BLOCK.itemsize
_WORDS = padded_words(_BYTES)
_DIGITS = 5


@kernel
def _decode(data: npt.NDArray[np.uint8], out: npt.NDArray[np.float32]) -> None:
    lane = lane_numbers()
    for k in range(data.size // _BYTES):
        start = k * _BYTES
        first = k * _ELEMS
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


@kernel
def _quantize(source: Rows, out: npt.NDArray[np.uint8]) -> int:
    x = float_tile(_ELEMS)
    codes, words = int_tile(_ELEMS), int_tile(_WORDS)
    for first in range(0, out.size // _BYTES, LANES):
        if not load_blocks(source, first, _ELEMS, x):
            return first_not_finite(x, _ELEMS, first, out.size // _BYTES)
        words[13] = ternary_codes(x, codes)
        _pack_digits(codes, 5, 32, words)
        _pack_digits(tail(codes, 160), 5, 16, tail(words, 8))
        _pack_digits(tail(codes, 240), 4, 4, tail(words, 12))
        store_blocks(words, out, first, _BYTES)
    return -1


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


FORMAT = block_format(TQ1_0, _decode, _quantize)
