"""MXFP4: 32 weights in 17 bytes, 4.25 bits each; the OCP microscaling format with E2M1 elements.

bytes     field
0         e   E8M0: the scale is 2**(e - 127)
1 .. 16   qs  codes q of 4 bits: byte i holds q[i] in its lower half and q[i + 16] in the upper

weight[i] = 2**(e - 128) * doubled[q[i]], the doubled values of E2M1 being

    0 1 2 3 4 6 8 12  -0 -1 -2 -3 -4 -6 -8 -12

e = 255 is no NaN here but 2**127. The reference takes e from the rounded float32 logarithm of the block's
largest magnitude, so that one a few steps below a power of two counts as that power; and below 2**-125 its
e wraps around to a scale that codes all weights as 0.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from gguf_tools.format.ggml_types import MXFP4
from quantize.formats.base import Rows, block_dtype, block_format
from quantize.formats.blocks_of_32.scales import ELEMS
from quantize.formats.fp4.codes import doubled_values, nearest_codes
from quantize.simd.floats import ZERO
from quantize.simd.kernel import inlinable, kernel
from quantize.simd.lane_memory import float_tile, gather, int_tile, load, store
from quantize.simd.lanes import (
    LANES,
    Floats,
    Ints,
    absolute,
    bits,
    from_bits,
    maximum,
    select,
    shift_right_logical,
    splat,
)
from quantize.simd.packing import pack
from quantize.simd.tiles import first_not_finite, load_blocks, padded_words, store_blocks

BLOCK = block_dtype(MXFP4)
_BYTES = BLOCK.itemsize
_WORDS = padded_words(_BYTES)

_LEAST_NORMAL = np.float32(2.0**-126)
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
def _decode(data: npt.NDArray[np.uint8], out: npt.NDArray[np.float32]) -> None:
    for k in range(data.size // _BYTES):
        start = k * _BYTES
        d = _half_scale(splat(data[start]))
        packed = load(data, start + 1)
        store(out, k * ELEMS, d * doubled_values(packed & 0xF))
        store(out, k * ELEMS + LANES, d * doubled_values(packed >> 4))


@inlinable
def _half_scale(e: Ints) -> Floats:
    """Return 2**(e - 128)."""
    return from_bits(select(e < 2, (e + 1) << 21, (e - 1) << 23))


@inlinable
def _exponent(largest: Floats, steps_below: npt.NDArray[np.int32]) -> Ints:
    """Return e for a block's largest magnitude: the rounded logarithm's integer part + 125, as a byte."""
    subnormal = largest < _LEAST_NORMAL
    pattern = bits(select(subnormal, largest * _RAISED, largest))
    bias = select(subnormal, splat(127 + _RAISE), 127)
    steps = gather(steps_below, (pattern >> 23) - bias + 1 - _LEAST_POWER)
    power = (pattern + steps >> 23) - bias
    return select(largest > ZERO, power + 125 & 0xFF, 0)


@kernel
def _quantize(source: Rows, steps_below: npt.NDArray[np.int32], out: npt.NDArray[np.uint8]) -> int:
    x = float_tile(ELEMS)
    codes, words = int_tile(ELEMS), int_tile(_WORDS)
    for first in range(0, out.size // _BYTES, LANES):
        if not load_blocks(source, first, ELEMS, x):
            return first_not_finite(x, ELEMS, first, out.size // _BYTES)
        largest = splat(ZERO)
        for i in range(ELEMS):
            largest = maximum(absolute(x[i]), largest)
        e = _exponent(largest, steps_below)
        nearest_codes(x, 0, ELEMS, _half_scale(e), codes)
        pack(codes, 0, 4, 16, 16, words)
        words[4] = shift_right_logical(words[3], 24)
        for k in range(3, 0, -1):
            words[k] = words[k] << 8 | shift_right_logical(words[k - 1], 24)
        words[0] = words[0] << 8 | e
        store_blocks(words, out, first, _BYTES)
    return -1


FORMAT = block_format(MXFP4, _decode, _quantize, tables=lambda: (_STEPS_BELOW,))
