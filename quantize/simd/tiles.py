"""Tiles: LANES blocks side by side, tile[elem] holding element elem of each of them.

A kernel loads a tile, works as if on one block, and stores what it made. Blocks are numbered through all
rows; the last tile may be ragged: its surplus lanes repeat the last block and are not stored.

Encoded blocks leave through a Tile of Ints: words[k] holds bytes 4k .. 4k + 3 of each block, little-endian.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import overload

from quantize.simd.floats import from_bfloat_bits, from_half_bits
from quantize.simd.kernel import inlinable, kernel
from quantize.simd.lane_items import lowest_bit, mask_word
from quantize.simd.lane_memory import FloatTile, IntTile, TileType, item_pointer, load, store
from quantize.simd.lanes import INTS, LANES, Floats, Mask, any_lane, bits, maximum, operation, splat

_EXPONENT = 0x7F800000
"""The bits of a float32's exponent, all set in a NaN or an infinity."""


def padded_words(block_bytes: int) -> int:
    """Return the size of a Tile of words for such blocks: `store_blocks` transposes LANES words at a time."""
    return -(-block_bytes // (4 * LANES)) * LANES


@inlinable
def load_blocks(source: npt.NDArray[Any], first: int, block_elems: int, tile: FloatTile) -> bool:
    """Fill tile[elem] with blocks first .. first + LANES - 1 of a source, and return whether all are finite.

    A NaN or an infinity poisons its block. Looking for them here costs next to nothing.

    block_elems  a multiple of LANES
    """
    last = source.size // block_elems - 1
    exponents = splat(0)
    for lane in range(LANES):
        start = min(first + lane, last) * block_elems
        for elem in range(0, block_elems, LANES):
            value = _read(source, start + elem)
            tile[elem + lane] = value
            exponents = maximum(bits(value) & _EXPONENT, exponents)
    for elem in range(0, block_elems, LANES):
        _transpose(tile, elem)
    return not any_lane(exponents == _EXPONENT)


@inlinable
def first_not_finite(tile: FloatTile, block_elems: int, first: int, n_blocks: int) -> int:
    """Return the number of the first block of a tile that holds a NaN or an infinity; one of them does."""
    exponents = splat(0)
    for i in range(block_elems):
        exponents = maximum(bits(tile[i]) & _EXPONENT, exponents)
    return first_failure(exponents == _EXPONENT, first, n_blocks)


@inlinable
def first_failure(failed: Mask, first: int, n_blocks: int) -> int:
    """Return the number of the first block of a tile that failed; `failed` holds in at least one lane."""
    return min(first + lowest_bit(mask_word(failed)), n_blocks - 1)


@inlinable
def load_columns(
    source: npt.NDArray[Any], row_elems: int, first: int, column: int, count: int, tile: FloatTile
) -> None:
    """Fill tile[i] with elements column + i of rows first .. first + LANES - 1; count a multiple of LANES."""
    last = source.size // row_elems - 1
    for lane in range(LANES):
        start = min(first + lane, last) * row_elems + column
        for elem in range(0, count, LANES):
            tile[elem + lane] = _read(source, start + elem)
    for elem in range(0, count, LANES):
        _transpose(tile, elem)


@inlinable
def store_columns(
    tile: FloatTile, row_elems: int, first: int, column: int, count: int, out: npt.NDArray[np.float32]
) -> None:
    """Write tile[i] to elements column + i of rows first .. first + LANES - 1, those that exist.

    tile    its first `count` vectors, a multiple of LANES, are lost
    """
    n_rows = min(LANES, out.size // row_elems - first)
    for elem in range(0, count, LANES):
        _transpose(tile, elem)
    for lane in range(n_rows):
        start = (first + lane) * row_elems + column
        for elem in range(0, count, LANES):
            store(out, start + elem, tile[elem + lane])


@inlinable
def load_importances(
    importances: npt.NDArray[np.float32], first: int, block_elems: int, tile: FloatTile
) -> None:
    """Fill tile[elem] with the importances, float32 (n_cols,), that belong to the elements of `load_blocks`.

    Rows have n_cols elements, so blocks of all rows run through the same importances again and again.
    """
    per_row = importances.size // block_elems
    for lane in range(LANES):
        start = (first + lane) % per_row * block_elems
        for elem in range(0, block_elems, LANES):
            tile[elem + lane] = load(importances, start + elem)
    for elem in range(0, block_elems, LANES):
        _transpose(tile, elem)


@inlinable
def store_blocks(words: IntTile, out: npt.NDArray[np.uint8], first: int, block_bytes: int) -> None:
    """Write blocks first .. first + LANES - 1, those that exist, to `out`, uint8 of all blocks' bytes.

    words   Tile of padded_words(block_bytes) Ints; its contents are lost
    """
    count = min(LANES, out.size // block_bytes - first)
    for word in range(0, (block_bytes + 3) // 4, LANES):
        _transpose(words, word)
    for lane in range(count):
        for byte in range(0, block_bytes, 4 * LANES):
            size = min(4 * LANES, block_bytes - byte)
            _copy_bytes(words, byte // 4 + lane, out, (first + lane) * block_bytes + byte, size)


def _read(source: npt.NDArray[Any], index: int) -> Floats:
    """Return source[index : index + LANES] of any array made by `base.as_source`, as Floats."""
    raise NotImplementedError("for kernels only")


@overload(_read, strict=False)  # the check compares annotations too, which lambdas lack
def _read_by_type(source: Any, index: Any) -> Any:
    readers = {
        types.float32: lambda source, index: load(source, index),
        types.uint16: lambda source, index: from_bfloat_bits(load(source, index)),
        types.int16: lambda source, index: from_half_bits(load(source, index)),
    }
    return readers.get(source.dtype)


def read_item(source: npt.NDArray[Any], index: int) -> np.float32:
    """Return source[index] of any array made by `base.as_source`, as float32."""
    raise NotImplementedError("for kernels only")


@overload(read_item, strict=False)
def _read_item_by_type(source: Any, index: Any) -> Any:
    readers = {
        types.float32: lambda source, index: source[index],
        types.uint16: lambda source, index: from_bfloat_bits(source[index]),
        types.int16: lambda source, index: from_half_bits(source[index]),
    }
    return readers.get(source.dtype)


@operation
def _transpose(_context: Any, tile: Any, start: Any) -> Any:
    """Exchange rows and columns of the square tile[start : start + LANES], in place."""
    if not isinstance(tile, TileType):
        return None

    def emit(context: Any, builder: Any, _sig: Any, args: Any) -> Any:
        pointers = [builder.gep(args[0], [builder.add(args[1], args[1].type(k))]) for k in range(LANES)]
        rows = [builder.load(pointer) for pointer in pointers]
        step = LANES // 2
        while step:  # each pass exchanges one bit of the row number with the same bit of the lane number
            upper = [lane & step for lane in range(LANES)]
            into_low = [LANES + k - step if up else k for k, up in enumerate(upper)]
            into_high = [LANES + k if up else k + step for k, up in enumerate(upper)]
            for low in range(LANES):
                if not low & step:
                    pair = rows[low], rows[low + step]
                    rows[low] = builder.shuffle_vector(*pair, ir.Constant(INTS.vector, into_low))
                    rows[low + step] = builder.shuffle_vector(*pair, ir.Constant(INTS.vector, into_high))
            step //= 2
        for row, pointer in zip(rows, pointers, strict=True):
            builder.store(row, pointer)
        return context.get_dummy_value()

    return types.void(tile, types.intp), emit


@operation
def _copy_bytes(_context: Any, words: Any, index: Any, out: Any, byte: Any, size: Any) -> Any:
    """Write the first `size` bytes of words[index] to out[byte : byte + size]."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        source = builder.gep(args[0], [args[1]])
        target = item_pointer(context, builder, sig.args[2], args[2], args[3])
        cgutils.raw_memcpy(builder, target, source, args[4], 1)
        return context.get_dummy_value()

    return types.void(words, types.intp, out, types.intp, types.intp), emit


@kernel
def widen(source: npt.NDArray[Any], widened: npt.NDArray[np.float32]) -> None:
    """Fill `widened` with the values of a flat array made by `base.as_source`, exactly."""
    for i in range(source.size):
        widened[i] = read_item(source, i)
