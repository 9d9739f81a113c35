"""Levels of the trellis types (KT), which are not stored but come out of a generator.

A number starts a walk of 32-bit numbers, each the last one times a constant. Each step gives one level: the
lower 6 bits of the four bytes, added up, less 126. Four such sums of uniform numbers are almost normal.

Source: QuantizerIQKT::set_values of iqk_quantize.cpp, as of ik_llama.cpp 8337e4c (2026-08-15).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from quantize.simd.kernel import inlined
from quantize.simd.lanes import Floats, Ints, shift_right_logical, to_float

START = 4096
"""Offset that is added to a stored index to start a walk."""

_FACTOR = np.uint32(0xCBAC1FED)
_SIX_BITS = np.uint32(0x3F3F3F3F)
_FACTOR_INT, _SIX_BITS_INT = int(_FACTOR), int(_SIX_BITS)
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


@inlined
def levels_of_lanes(number: Ints) -> tuple[Ints, Floats]:
    """Return the numbers that follow those in lanes, and their levels."""
    number = number * _FACTOR_INT
    total = shift_right_logical((number & _SIX_BITS_INT) * 0x01010101, 24)  # the upper byte is the sum of all
    return number, to_float(total - _MEAN)


def walks(start: int, count: int, steps: int) -> npt.NDArray[np.int64]:
    """Return the levels of the walks from start, start + 1 .. start + count - 1, (count, steps)."""
    numbers = np.arange(start, start + count, dtype=np.uint32)
    levels = np.empty((count, steps), np.int64)
    for k in range(steps):
        numbers = numbers * _FACTOR
        levels[:, k] = (numbers & _SIX_BITS).view(np.uint8).reshape(count, 4).sum(
            axis=1, dtype=np.int64
        ) - _MEAN
    return levels
