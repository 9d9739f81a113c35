"""Q8_0: 32 weights in 34 bytes, 8.5 bits each.

bytes     field
0 .. 1    d   float16
2 .. 33   qs  signed codes q of 8 bits

weight[i] = d * q[i]
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from gguf_tools.format.ggml_types import Q8_0
from quantize.formats.base import Floats32, block_format
from quantize.formats.block_kernels import plain_kernel
from quantize.formats.blocks_of_32.scales import ELEMS
from quantize.simd.floats import INFINITY, ONE, ZERO, float_at, to_half_bits
from quantize.simd.kernel import kernel
from quantize.simd.lane_memory import FloatTile, IntTile, int_tile, load, store
from quantize.simd.lanes import LANES, absolute, bits, from_bits, maximum, select, splat, to_float, to_int
from quantize.simd.packing import pack, prepend_half

_TOP = np.float32(127)
_BYTES = Q8_0.block_bytes
_SIGN = -0x80000000
_ALMOST_HALF = int(np.nextafter(np.float32(0.5), ZERO).view(np.int32))


@kernel
def _decode(data: npt.NDArray[np.int8], out: Floats32) -> None:
    for k in range(data.size // _BYTES):
        start = k * _BYTES
        d = float_at(data, start)
        for i in range(0, ELEMS, LANES):
            store(out, k * ELEMS + i, d * to_float(load(data, start + 2 + i)))


@plain_kernel(Q8_0)
def _quantize(x: FloatTile, words: IntTile) -> None:
    codes = int_tile(ELEMS)
    largest = splat(ZERO)
    for i in range(ELEMS):
        largest = maximum(largest, absolute(x[i]))
    d = largest / _TOP
    # where 1 / d overflows, the reference converts infinities and NaN to integers and gets 0
    inverse = ONE / d
    inverse = select(inverse == INFINITY, ZERO, inverse)
    for i in range(ELEMS):
        # C's roundf: ties away from zero; the largest number below 1/2 carries no 0.49999997 over to 1
        scaled = x[i] * inverse
        codes[i] = to_int(scaled + from_bits(bits(scaled) & _SIGN | _ALMOST_HALF))
    pack(codes, 0, 8, ELEMS, ELEMS, words)
    prepend_half(to_half_bits(d), words, 8)


FORMATS = (block_format(Q8_0, _decode, _quantize, item=np.int8),)
