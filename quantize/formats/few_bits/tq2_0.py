"""TQ2_0: 256 weights in 66 bytes, 2.0625 bits each; for models whose weights are -1, 0 or 1 times a scale.

    bytes       field
    0 .. 63     qs  codes q of 2 bits: 32 bytes hold 128, the lowest bits first (packing.pack)
    64 .. 65    d   float16

weight[i] = d * (q[i] - 1)

The encoder makes codes 0 .. 2 only; d is the largest magnitude.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from gguf_tools.format.ggml_types import TQ2_0
from quantize.formats.base import Rows, block_dtype, block_format
from quantize.simd.floats import HALF, INFINITY, ONE, ZERO, float_at, to_half_bits
from quantize.simd.kernel import inlinable, kernel
from quantize.simd.lane_memory import FloatTile, IntTile, float_tile, int_tile, load, store
from quantize.simd.lanes import LANES, Ints, absolute, maximum, select, splat, to_float
from quantize.simd.packing import pack
from quantize.simd.tiles import first_not_finite, load_blocks, padded_words, store_blocks

BLOCK = block_dtype(TQ2_0)
_ELEMS = 256
_BYTES = BLOCK.itemsize
_WORDS = padded_words(_BYTES)


@kernel
def _decode(data: npt.NDArray[np.uint8], out: npt.NDArray[np.float32]) -> None:
    for k in range(data.size // _BYTES):
        start = k * _BYTES
        d = float_at(data, start + 64)
        for byte in range(0, 64, LANES):
            packed = load(data, start + byte)
            first = k * _ELEMS + byte // 32 * 128 + byte % 32
            for n in range(4):
                store(out, first + 32 * n, d * to_float((packed >> 2 * n & 3) - 1))


@inlinable
def ternary_codes(x: FloatTile, codes: IntTile) -> Ints:
    """Fill 256 codes, 0 .. 2, and return the bits of d; a half of d and more counts as d.

    Where 1 / d overflows, the reference converts infinities and NaN to integers and gets code 1.
    """
    d = splat(ZERO)
    for i in range(_ELEMS):
        d = maximum(d, absolute(x[i]))
    inverse = ONE / d
    inverse = select(inverse == INFINITY, ZERO, inverse)
    for i in range(_ELEMS):
        scaled = x[i] * inverse
        code = select(scaled >= HALF, splat(2), 1)
        codes[i] = select(scaled <= -HALF, 0, code)
    return to_half_bits(d)


@kernel
def _quantize(source: Rows, out: npt.NDArray[np.uint8]) -> int:
    x = float_tile(_ELEMS)
    codes, words = int_tile(_ELEMS), int_tile(_WORDS)
    for first in range(0, out.size // _BYTES, LANES):
        if not load_blocks(source, first, _ELEMS, x):
            return first_not_finite(x, _ELEMS, first, out.size // _BYTES)
        words[16] = ternary_codes(x, codes)
        pack(codes, 0, 2, 32, 64, words)
        store_blocks(words, out, first, _BYTES)
    return -1


FORMAT = block_format(TQ2_0, _decode, _quantize)
