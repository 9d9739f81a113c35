"""Finding NaN and infinity: in rows of floats, and among the scales of encoded rows.

A weight beyond what a type can hold makes a scale infinite, and one such scale turns all that a model
computes into NaN. So every encoder's bytes are looked at. These are kernels, because all bytes of a run pass
here: they take about 2 % of the processor time of a run to Q8_0, and 0.6 % of one to Q4_K.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from gguf_tools.format.block_layouts import EXPONENTS, SCALES, count_nonfinite
from gguf_tools.format.ggml_types import GGMLType, by_name
from quantize.simd.kernel import inlinable, kernel
from quantize.simd.lane_memory import load
from quantize.simd.lanes import LANES, any_lane, maximum, splat

_FLOATS = {
    "F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(ml_dtypes.bfloat16),
}  # fmt: skip

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
    places = _places(type_.name, data.shape[1])
    if places is not None and not _any_exponent(data.reshape(-1), places):
        return None  # as nearly always, so all that is done up to here is kept short
    if type_.name in _FLOATS:
        index = first_nonfinite(data.reshape(-1).view(_FLOATS[type_.name]))
        return None if index < 0 else divmod(index, data.shape[1] // type_.block_bytes)
    _, row = count_nonfinite(type_, data.reshape(-1), data.shape[1])
    if row < 0:
        return None
    if type_.rows_interleaved > 1 or type_.row_meta_bytes:
        return row, 0
    return row, count_nonfinite(type_, data[row], type_.block_bytes)[1]


@cache
def _places(name: str, row_bytes: int) -> npt.NDArray[np.int64] | None:
    """Return where the upper parts of a type's exponents are, (n, 3): first byte, step, mask.

    None for floats, and for interleaved types, whose rows were looked at before they were interleaved
    """
    type_, scales = by_name(name), SCALES.get(name)
    if name in _FLOATS or type_.rows_interleaved > 1:
        return None
    places = []
    if scales is not None:
        for fields, step in ((scales.block, type_.block_bytes), (scales.row, row_bytes)):
            for field in fields:
                byte, mask = EXPONENTS[field.kind][0]
                places.append((field.offset + byte, step, mask))
    return _read_only(np.array(places, np.int64), np.int64).reshape(-1, 3)


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
def _any_exponent(data: npt.NDArray[np.uint8], places: npt.NDArray[np.int64]) -> bool:
    """Return whether one of the bytes at start, start + step ... has all bits of its mask set."""
    for start, step, mask in places:
        largest = np.uint8(0)
        upper = np.uint8(mask)
        for i in range((data.size - start + step - 1) // step):  # no branch: all blocks of a run pass
            largest = max(largest, data[start + i * step] & upper)
        if largest == upper:
            return True
    return False
