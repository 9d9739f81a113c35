"""Finding NaN and infinity: in rows of floats, and among the scales of encoded rows.

A weight beyond what a type can hold makes a scale infinite, and one such scale turns all that a model
computes into NaN. So every encoder's bytes are looked at. These are kernels, because all bytes of a run pass
here: looking at them takes about 1 % of the time in which the fastest type is encoded.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from gguf_tools.ggml_types import BF16, F16, F32, GGMLType
from gguf_tools.scales import EXPONENTS, SCALES, Scales, count_nonfinite
from quantize.simd.kernel import inlinable, kernel
from quantize.simd.lane_memory import load
from quantize.simd.lanes import LANES, any_lane, maximum, splat

_FLOATS = {F32: np.dtype(np.float32), F16: np.dtype(np.float16), BF16: np.dtype(ml_dtypes.bfloat16)}

# Sign and mantissa bits masked away, an all-ones exponent is infinity or NaN, in all three formats.
_EXPONENT = {
    np.dtype(np.float32): (np.int32, 0x7F800000),
    np.dtype(np.float16): (np.int16, 0x7C00),
    np.dtype(ml_dtypes.bfloat16): (np.uint16, 0x7F80),
}
_RUN = 1024


def first_nonfinite(rows: npt.NDArray[Any]) -> int:
    """Return the flat index of the first NaN or infinity in `rows`, or -1.

    rows  float32, float16 or bfloat16, C-contiguous, any shape
    """
    integer, exponent = _EXPONENT[rows.dtype]
    return int(_first_with_exponent(_read_only(rows, integer), exponent))


def first_bad_scale(type_: GGMLType, data: npt.NDArray[np.uint8]) -> tuple[int, int] | None:
    """Return row and block of the first scale that is NaN or infinite; None where all are finite.

    type_    of `data`; where it interleaves rows, the row is the first of a group, and the block is 0
    data     uint8 (n_rows, row bytes), C-contiguous and little-endian
    returns  block 0 for a scale of the whole row
    """
    if type_ in _FLOATS:
        index = first_nonfinite(data.reshape(-1).view(_FLOATS[type_]))
        return None if index < 0 else divmod(index, data.shape[1] // type_.block_bytes)
    flat = _read_only(data, np.uint8)
    is_plain = type_.rows_interleaved == 1
    if is_plain and not any(_any_exponent(flat, *place) for place in _places(type_, data.shape[1])):
        return None
    _, row = count_nonfinite(type_, flat, data.shape[1])
    if row < 0:
        return None
    if not is_plain or type_.row_meta_bytes:
        return row, 0
    return row, count_nonfinite(type_, data[row], type_.block_bytes)[1]


@cache
def _places(type_: GGMLType, row_bytes: int) -> tuple[tuple[int, int, int], ...]:
    """Return where the upper parts of a type's exponents are: (first byte, step, mask)."""
    scales = SCALES.get(type_.name, Scales())
    numbers = [(code, start, type_.block_bytes) for code, start in scales.block]
    if scales.row:
        numbers.append((scales.row, 0, row_bytes))
    return tuple(
        (start + byte, step, mask)
        for code, start, step in numbers
        for byte, mask in EXPONENTS[code][:1]
    )


def _read_only(array: npt.NDArray[Any], item: npt.DTypeLike) -> npt.NDArray[Any]:
    """Return an array flat, as kernels are compiled for."""
    flat = array.reshape(-1).view(item)
    flat.flags.writeable = False
    return flat


@kernel
def _first_with_exponent(bits: npt.NDArray[Any], exponent: int) -> int:
    """Return the index of the first item with all bits of `exponent` set, or -1."""
    whole = bits.size // _RUN * _RUN
    for start in range(0, whole, _RUN):
        largest = splat(0)
        for i in range(start, start + _RUN, LANES):  # without a branch; only a run that holds one is searched
            largest = maximum(load(bits, i) & exponent, largest)
        if any_lane(largest == exponent):
            return _search(bits, exponent, start)
    return _search(bits, exponent, whole)


@inlinable
def _search(bits: npt.NDArray[Any], exponent: int, start: int) -> int:
    for i in range(start, bits.size):
        if bits[i] & exponent == exponent:
            return i
    return -1


@kernel
def _any_exponent(data: npt.NDArray[np.uint8], start: int, step: int, mask: int) -> bool:
    """Return whether one of the bytes at start, start + step ... has all bits of `mask` set."""
    largest = np.uint8(0)
    for i in range((data.size - start + step - 1) // step):  # without a branch: all blocks of a run pass
        largest = max(largest, data[start + i * step] & mask)
    return largest == mask
