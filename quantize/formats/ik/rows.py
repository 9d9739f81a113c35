"""Rows encoded by kernels whose lanes are rows: what surrounds those of ik_llama.cpp's types.

Importances are the same for all rows, so a kernel takes them as scalars. Rows come as float32: the searches
take so long that a conversion beforehand costs nothing, and a kernel is compiled for one type of source.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from gguf_tools.format.ggml_types import GGMLType
from quantize.formats.base import (
    BlockRefused,
    Bytes,
    Decode,
    Floats32,
    QuantFormat,
    Rows,
    as_floats,
    as_source,
    check_data,
    check_rows,
    decode_blocks,
)
from quantize.importances.weighting import Weighting
from quantize.simd.floats import INFINITY
from quantize.simd.kernel import inlinable
from quantize.simd.lane_items import lowest_bit, mask_word
from quantize.simd.lane_memory import IntTile
from quantize.simd.lanes import LANES, Floats, absolute, any_lane
from quantize.simd.tiles import store_blocks

SUPER_ELEMS = 256
"""Weights of a block, of nearly all these types."""


def ik_format(
    type_: GGMLType, sub_elems: int, quantize: Callable[..., int], decode: Callable[..., None]
) -> QuantFormat:
    """Return the codec of a type of ik_llama.cpp, from its kernels.

    sub_elems  weights of a sub-block
    quantize   the kernel of `encode_rows`, or of `encode_scaled_rows` where a row starts with its scale
    decode     the kernel of `base.decode_blocks`, or of `decode_scaled_rows`
    """

    def encode_type(rows: Rows, weighting: Weighting | None) -> Bytes:
        encode = encode_scaled_rows if type_.row_meta_bytes else encode_rows
        return encode(rows, weighting, type_, sub_elems, quantize)

    def decode_type(data: Bytes, n_cols: int) -> Floats32:
        if type_.row_meta_bytes:
            return decode_scaled_rows(data, n_cols, type_, decode)
        return decode_blocks(data, n_cols, type_, decode)

    return QuantFormat(type_, encode_type, decode_type)


def encode_rows(
    rows: Rows, weighting: Weighting | None, type_: GGMLType, sub_elems: int, kernel: Callable[..., int]
) -> Bytes:
    """Return `rows` as `type_`, made by a kernel.

    sub_elems  weights of a sub-block
    kernel     called as kernel(source, importances, out): source float32 of all weights, importances float32
               (n_cols,), out uint8 of all bytes. It returns -1, or a row with a scale too large for float16
    raises     what the contract of codecs says
    """
    _check(rows, weighting, type_)
    data = np.zeros((len(rows), type_.row_bytes(rows.shape[1])), np.uint8)
    if rows.size:
        importances = costs(weighting, rows.shape[1], sub_elems)
        _refuse(kernel(as_floats(rows), importances, data.reshape(-1)), rows, type_)
    return data


def encode_scaled_rows(
    rows: Rows, weighting: Weighting | None, type_: GGMLType, sub_elems: int, kernel: Callable[..., int]
) -> Bytes:
    """Return `rows` as a type that has a scale in front of each row, as `encode_rows` does.

    kernel  called as kernel(source, importances, scales, out); it fills scales, float32 (n_rows,), too
    """
    scales = np.zeros(len(rows), np.float32)

    def scaled(source: Floats32, importances: Floats32, out: Bytes) -> int:
        return kernel(source, importances, scales, out)

    data = encode_rows(rows, weighting, type_, sub_elems, scaled)
    with np.errstate(over="ignore"):  # an infinite one is found by QuantFormat.encode
        data[:, : type_.row_meta_bytes] = scales.astype(_scale_of(type_)).reshape(-1, 1).view(np.uint8)
    return data


def decode_scaled_rows(data: Bytes, n_cols: int, type_: GGMLType, kernel: Callable[..., None]) -> Floats32:
    """Return the rows of a type that has a scale, and nothing else, in front of each row.

    kernel  called as kernel(blocks, scales, out): blocks are uint8 (n_rows, bytes of a row behind its scale),
            scales float32 (n_rows,), out float32 (n_rows, n_cols)
    """
    check_data(data, n_cols, type_)
    size = type_.row_meta_bytes
    scales = np.ascontiguousarray(data[:, :size]).view(_scale_of(type_)).astype(np.float32).reshape(-1)
    rows = np.empty((len(data), n_cols), np.float32)
    kernel(read_only(np.ascontiguousarray(data[:, size:])), scales, rows)
    return rows


def _scale_of(type_: GGMLType) -> str:
    """Return the dtype of the scale in front of each row: float16 or float32."""
    return f"<f{type_.row_meta_bytes}"


def group_decoder(type_: GGMLType, kernel: Callable[..., None], table: Callable[[], Floats32]) -> Decode:
    """Return the decoder of an interleaved type.

    kernel  called as kernel(groups, table(), out): groups are those of `as_groups`, out is float32
            (n_rows, n_cols)
    """

    def decode(data: Bytes, n_cols: int) -> Floats32:
        check_data(data, n_cols, type_)
        rows = np.empty((len(data), n_cols), np.float32)
        kernel(read_only(as_groups(data, type_)), table(), rows)
        return rows

    return decode


def as_groups(data: Bytes, type_: GGMLType) -> Bytes:
    """Return rows of an interleaved type as its groups, (n_groups, bytes of a group)."""
    return np.ascontiguousarray(data).reshape(-1, type_.rows_interleaved * data.shape[1])


def read_only(data: Bytes) -> Bytes:
    """Return a view that can't be written to, so that a kernel is compiled for one type of array."""
    view = data.view()
    view.flags.writeable = False
    return view


def _refuse(row: int, rows: Rows, type_: GGMLType) -> None:
    """Raise BlockRefused if a kernel has returned a row."""
    if row >= 0:
        largest = float(np.abs(rows[row].astype(np.float32)).max())
        raise BlockRefused(
            type_.name,
            row,
            f": weights are so large (up to {largest:g}) that their scale is no float16; choose another type",
        )


def _check(rows: Rows, weighting: Weighting | None, type_: GGMLType) -> None:
    """Raise what the contract says of rows that a type can't hold."""
    check_rows(rows, weighting, type_)
    held = np.abs(rows.astype(np.float32, copy=False)) <= _LARGEST  # no NaN is
    if not held.all():
        row, column = (int(place[0]) for place in np.nonzero(~held))
        first = column // type_.block_elems * type_.block_elems
        is_finite = bool(np.isfinite(rows[row, column]))
        reason = f"a weight beyond {_LARGEST:.3g}" if is_finite else "a weight is not a finite number"
        raise BlockRefused(type_.name, row, f", columns {first} to {first + type_.block_elems - 1}: {reason}")


_LARGEST = 2.0**126
"""Weight beyond which what a neighbour is decoded to could overflow float32."""


def costs(weighting: Weighting | None, n_cols: int, sub_elems: int) -> Floats32:
    """Return the costs of errors in each column: importances of at most 1, or 1 where there are none.

    Where no column of a sub-block has an importance, they all cost the same, and next to nothing.
    """
    values = np.ones(n_cols) if weighting is None else weighting.values.astype(np.float64)
    largest = float(values.max(initial=0))
    parts = np.minimum(values / largest if largest > 0 else values, 1).reshape(-1, sub_elems)
    parts = parts.astype(np.float32)
    parts[parts.max(axis=1) < _NOTHING] = _NOTHING
    return as_source(parts)


_NOTHING = np.float32(2.0**-40)


@inlinable
def store_in_rows(
    words: IntTile, block_bytes: int, offset: int, first: int, out: npt.NDArray[Any], n_rows: int
) -> None:
    """Write one block of each of rows first .. first + LANES - 1, those that exist.

    words   Tile of padded_words(block_bytes) Ints; its contents are lost
    offset  of the block in its row
    out     uint8 of all rows' bytes
    """
    blocks = np.empty(LANES * block_bytes, np.uint8)
    store_blocks(words, blocks, 0, block_bytes)
    row_bytes = out.size // n_rows
    for lane in range(min(LANES, n_rows - first)):
        start = (first + lane) * row_bytes + offset
        out[start : start + block_bytes] = blocks[lane * block_bytes : (lane + 1) * block_bytes]


@inlinable
def first_infinite(d: Floats, first: int) -> int:
    """Return the number of the first of LANES rows whose d is infinite, or -1; surplus lanes repeat a row."""
    infinite = absolute(d) == INFINITY
    return first + lowest_bit(mask_word(infinite)) if any_lane(infinite) else -1
