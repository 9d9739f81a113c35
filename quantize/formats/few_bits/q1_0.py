"""Q1_0: 128 weights in 18 bytes, 1.125 bits each: the sign of a weight, and the mean magnitude.

bytes     field
0 .. 1    d   float16
2 .. 17   qs  codes q of 1 bit: bit i % 8 of byte i // 8 is q[i]

weight[i] = d if q[i] else -d
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from gguf_tools.format.ggml_types import Q1_0
from quantize.formats.base import Rows, block_format
from quantize.simd.floats import ZERO, float_at, to_half_bits
from quantize.simd.kernel import inlinable, kernel
from quantize.simd.lane_memory import float_tile, int_tile, store
from quantize.simd.lanes import LANES, absolute, bits, from_bits, lane_numbers, select, splat
from quantize.simd.packing import prepend_half
from quantize.simd.tiles import first_not_finite, load_blocks, padded_words, store_blocks

_ELEMS = 128
_BYTES = Q1_0.block_bytes
_WORDS = padded_words(_BYTES)
_QUIET = 0x00400000


@kernel
def _decode(data: npt.NDArray[np.uint8], out: npt.NDArray[np.float32]) -> None:
    bit = splat(1) << lane_numbers()
    for k in range(data.size // _BYTES):
        start = k * _BYTES
        d = _quiet(float_at(data, start))
        for i in range(_ELEMS // LANES):
            word = data[start + 2 + 2 * i] | data[start + 3 + 2 * i] << 8
            store(out, k * _ELEMS + i * LANES, select((bit & word) != 0, splat(d), -d))


@inlinable
def _quiet(value: np.float32) -> np.float32:
    """Return `value`; a signalling NaN as the quiet one that the reference's conversion of halves makes."""
    return select(value == value, value, from_bits(bits(value) | _QUIET))


@kernel
def _quantize(source: Rows, out: npt.NDArray[np.uint8]) -> int:
    x = float_tile(_ELEMS)
    words = int_tile(_WORDS)
    for first in range(0, out.size // _BYTES, LANES):
        if not load_blocks(source, first, _ELEMS, x):
            return first_not_finite(x, _ELEMS, first, out.size // _BYTES)
        total = splat(ZERO)
        for i in range(_ELEMS):
            total += absolute(x[i])
        for k in range(4):
            word = splat(0)
            for i in range(32):
                word |= select(x[32 * k + i] >= ZERO, splat(1), 0) << i
            words[k] = word
        prepend_half(to_half_bits(total / np.float32(_ELEMS)), words, 4)
        store_blocks(words, out, first, _BYTES)
    return -1


FORMAT = block_format(Q1_0, _decode, _quantize)
