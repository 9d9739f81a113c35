"""What the trellis types (KT) share: levels that are not stored but come out of a generator.

A number starts a walk of 32-bit numbers, each the last one times a constant. Each step gives one level: the
lower 6 bits of the four bytes, added up, less 126. Four such sums of uniform numbers are almost normal.

Source: QuantizerIQKT::set_values of iqk_quantize.cpp, as of ik_llama.cpp 8337e4c (2026-08-15).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from quantize.simd.kernel import inlined

START = 4096
"""What is added to a stored index to start a walk."""

_FACTOR = np.uint32(0xCBAC1FED)
_SIX_BITS = np.uint32(0x3F3F3F3F)
_MEAN = 126


@inlined
def step(number: np.uint32) -> np.uint32:
    """Return the number that follows `number`."""
    return np.uint32(number * _FACTOR)


@inlined
def level(number: np.uint32) -> np.float32:
    """Return the level of a number, -126 .. 126."""
    bits = number & _SIX_BITS
    total = (bits & 0xFF) + (bits >> 8 & 0xFF) + (bits >> 16 & 0xFF) + (bits >> 24)
    return np.float32(np.int64(total) - _MEAN)


@inlined
def walk(start: int, scale: np.float32, weights: npt.NDArray[np.float32], count: int) -> None:
    """Fill weights[:count] with the levels of the walk from `start`, times `scale`."""
    number = np.uint32(start)
    for i in range(count):
        number = step(number)
        weights[i] = scale * level(number)
