"""Q8_K: 256 weights in 292 bytes, 9.125 bits each: what llama.cpp makes of activations to multiply K-quants.

    bytes         field
    0 .. 3        d      float32
    4 .. 259      qs     signed codes q of 8 bits
    260 .. 291    bsums  int16, the sum of each 16 codes; redundant

weight[i] = d * q[i]

A file can hold it, though llama.cpp has no operation on such a tensor and its ggml_quantize_chunk refuses to
make one. ik_llama.cpp's block has another layout.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from gguf_tools.format.ggml_types import Q8_K
from quantize.formats.base import Floats32, block_format
from quantize.formats.block_kernels import plain_kernel
from quantize.formats.search import farthest_from_zero
from quantize.simd.floats import ONE, ZERO, nearest_int
from quantize.simd.kernel import inlined, kernel
from quantize.simd.lane_memory import FloatTile, IntTile, int_tile, load, store, tail
from quantize.simd.lanes import LANES, bits, from_bits, minimum, select, splat, to_float
from quantize.simd.packing import pack

_ELEMS = 256
_BYTES = Q8_K.block_bytes
_TOP = np.float32(127)


@kernel
def _decode(data: npt.NDArray[np.int8], out: Floats32) -> None:
    for k in range(data.size // _BYTES):
        start = k * _BYTES
        word = 0
        for byte in range(4):
            word |= (data[start + byte] & 0xFF) << 8 * byte
        d = from_bits(word)
        for i in range(0, _ELEMS, LANES):
            store(out, k * _ELEMS + i, d * to_float(load(data, start + 4 + i)))


@plain_kernel(Q8_K, inlined)
def _quantize(x: FloatTile, words: IntTile) -> None:
    codes, sums = int_tile(_ELEMS), int_tile(16)
    largest, extreme = farthest_from_zero(x, _ELEMS)
    empty = largest == ZERO
    inverse = select(empty, ZERO, -_TOP / extreme)
    for j in range(16):
        total = splat(0)
        for i in range(16 * j, 16 * (j + 1)):
            codes[i] = minimum(nearest_int(inverse * x[i]), 127)
            total += codes[i] << 24 >> 24
        sums[j] = total
    words[0] = select(empty, 0, bits(ONE / inverse))
    pack(codes, 0, 8, _ELEMS, _ELEMS, tail(words, 1))
    for j in range(8):
        words[65 + j] = sums[2 * j] & 0xFFFF | sums[2 * j + 1] << 16


FORMATS = (block_format(Q8_K, _decode, _quantize, item=np.int8),)
