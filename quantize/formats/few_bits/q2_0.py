"""Q2_0: 64 weights in 18 bytes, 2.25 bits each.

bytes     field
0 .. 1    d   float16
2 .. 17   qs  codes q of 2 bits: byte i holds q[4 * i] .. q[4 * i + 3], the first in the lowest bits

weight[i] = d * (q[i] - 1)

The encoder makes codes 0 .. 2 only; d is the largest magnitude.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from gguf_tools.format.ggml_types import Q2_0
from quantize.formats.base import Rows, block_format
from quantize.simd.floats import HALF, INFINITY, ONE, ZERO, float_at, to_half_bits
from quantize.simd.kernel import kernel
from quantize.simd.lane_memory import float_tile, int_tile, store
from quantize.simd.lanes import LANES, absolute, lane_numbers, maximum, select, splat, to_float
from quantize.simd.packing import prepend_half
from quantize.simd.tiles import first_not_finite, load_blocks, padded_words, store_blocks

_ELEMS = 64
_BYTES = Q2_0.block_bytes
_WORDS = padded_words(_BYTES)


@kernel
def _decode(data: npt.NDArray[np.uint8], out: npt.NDArray[np.float32]) -> None:
    shift = 2 * lane_numbers()
    for k in range(data.size // _BYTES):
        start = k * _BYTES
        d = float_at(data, start)
        for i in range(_ELEMS // LANES):
            at = start + 2 + 4 * i
            word = data[at] | data[at + 1] << 8 | data[at + 2] << 16 | data[at + 3] << 24
            store(out, k * _ELEMS + i * LANES, d * to_float((splat(word) >> shift & 3) - 1))


@kernel
def _quantize(source: Rows, out: npt.NDArray[np.uint8]) -> int:
    x = float_tile(_ELEMS)
    words = int_tile(_WORDS)
    for first in range(0, out.size // _BYTES, LANES):
        if not load_blocks(source, first, _ELEMS, x):
            return first_not_finite(x, _ELEMS, first, out.size // _BYTES)
        d = splat(ZERO)
        for i in range(_ELEMS):
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
        store_blocks(words, out, first, _BYTES)
    return -1


FORMAT = block_format(Q2_0, _decode, _quantize)
