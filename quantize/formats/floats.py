"""F32, F16 and BF16: each weight is a float of its own."""

from __future__ import annotations

from collections.abc import Callable

import ml_dtypes
import numpy as np
import numpy.typing as npt

from gguf_tools.format.ggml_types import BF16, F16, F32, GGMLType
from quantize.formats.base import Bytes, Floats32, QuantFormat, Rows, as_source, check_data, check_rows
from quantize.importances.weighting import Weighting
from quantize.simd.floats import from_half_bits, to_bfloat_bits, to_half_bits
from quantize.simd.kernel import kernel
from quantize.simd.tiles import read_item
from quantize.simd.tiles import widen as widen_items


def widen(rows: Rows) -> Floats32:
    """Return `rows` as float32, exactly, C-contiguous; the same array when they already are."""
    if rows.dtype == np.float32:
        return np.ascontiguousarray(rows)
    widened = np.empty(rows.shape, np.float32)
    widen_items(as_source(rows), widened.reshape(-1))
    return widened


def _halves_encoder(
    type_: GGMLType, dtype: npt.DTypeLike, encode: Callable[..., None]
) -> Callable[[Rows, Weighting | None], Bytes]:
    """Return the function that encodes rows as a type of 16 bits; rows of its dtype are returned as they are.

    encode  the kernel that makes the bits of `halves` from a source
    """

    def make(rows: Rows, weighting: Weighting | None) -> Bytes:
        check_rows(rows, weighting, type_)
        if rows.dtype == dtype:
            return np.ascontiguousarray(rows).view(np.uint8)
        halves = np.empty(rows.shape, np.uint16)
        encode(as_source(rows), halves.reshape(-1))
        return halves.view(np.uint8)

    return make


# ---- F32


def _encode_f32(rows: Rows, weighting: Weighting | None) -> Bytes:
    """Return the bytes of `rows` as float32, exactly; a view of them when they already are."""
    check_rows(rows, weighting, F32)
    return widen(rows).view(np.uint8)


def _decode_f32(data: Bytes, n_cols: int) -> Floats32:
    """Decode F32: weights as they are, 4 bytes each.

        bytes   field
        0 .. 3  x  float32, little-endian

    weight = x
    """
    check_data(data, n_cols, F32)
    return np.ascontiguousarray(data).view(np.float32)


# ---- F16

_INFINITY = 0x7C00
_QUIET = 0x200


def _decode_f16(data: Bytes, n_cols: int) -> Floats32:
    """Decode F16: weights as halves, 2 bytes each.

        bytes   field
        0 .. 1  x  float16: 1 sign, 5 exponent (bias 15), 10 fraction bits

    weight = x

    Encoding rounds to nearest even, keeps subnormals, and turns what is too large into infinity; a caller
    that does not want that checks the result. Every NaN becomes 0x7E00 with its sign. Decoding makes a NaN a
    quiet one.
    """
    check_data(data, n_cols, F16)
    rows = np.empty((len(data), n_cols), np.float32)
    halves = np.ascontiguousarray(data).view(np.uint16).reshape(-1)
    halves.flags.writeable = False
    _from_halves(halves, rows.reshape(-1))
    return rows


# Plain loops over scalars: LLVM turns these into vectors of its own accord.


@kernel
def _to_halves(source: Rows, halves: npt.NDArray[np.uint16]) -> None:
    for i in range(source.size):
        halves[i] = to_half_bits(read_item(source, i))


@kernel
def _from_halves(halves: npt.NDArray[np.uint16], values: Floats32) -> None:
    for i in range(halves.size):
        half = halves[i]
        values[i] = from_half_bits(half | _QUIET if (half & 0x7FFF) > _INFINITY else half)


# ---- BF16


def _decode_bf16(data: Bytes, n_cols: int) -> Floats32:
    """Decode BF16: the upper halves of float32 weights, 2 bytes each.

        bytes   field
        0 .. 1  x  bfloat16: 1 sign, 8 exponent (bias 127), 7 fraction bits

    weight = x

    Encoding rounds to nearest even and keeps subnormals. A NaN keeps its upper bits and becomes a quiet one.
    """
    check_data(data, n_cols, BF16)
    return widen(np.ascontiguousarray(data).view(ml_dtypes.bfloat16))


@kernel
def _to_bfloats(source: Rows, halves: npt.NDArray[np.uint16]) -> None:
    for i in range(source.size):
        halves[i] = to_bfloat_bits(read_item(source, i))


FORMATS = (
    QuantFormat(F32, _encode_f32, _decode_f32),
    QuantFormat(F16, _halves_encoder(F16, np.float16, _to_halves), _decode_f16),
    QuantFormat(BF16, _halves_encoder(BF16, ml_dtypes.bfloat16, _to_bfloats), _decode_bf16),
)
