"""Tiles: what is loaded lies across the lanes, and what is stored is what exists."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from quantize.formats.base import as_source
from quantize.simd.kernel import inlinable
from quantize.simd.lane_memory import float_tile, int_tile, store
from quantize.simd.lanes import LANES, bits
from quantize.simd.packing import pack, unpack
from quantize.simd.tiles import first_not_finite, load_blocks, load_importances, padded_words, store_blocks

Array = npt.NDArray[Any]

ELEMS = 32


@inlinable
def load_all(source: Array, first: int, out: Array) -> None:
    tile = float_tile(ELEMS)
    load_blocks(source, first, ELEMS, tile)
    for i in range(ELEMS):
        store(out, i * LANES, tile[i])


@inlinable
def find_not_finite(source: Array, first: int, n_blocks: int) -> int:
    tile = float_tile(ELEMS)
    if load_blocks(source, first, ELEMS, tile):
        return -1
    return first_not_finite(tile, ELEMS, first, n_blocks)


@inlinable
def load_all_importances(importances: Array, first: int, out: Array) -> None:
    tile = float_tile(ELEMS)
    load_importances(importances, first, ELEMS, tile)
    for i in range(ELEMS):
        store(out, i * LANES, tile[i])


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("n_blocks", [1, LANES - 1, LANES, LANES + 1, 3 * LANES - 5])
def test_a_tile_holds_one_block_per_lane(dtype: npt.DTypeLike, n_blocks: int) -> None:
    rows = np.random.default_rng(1).standard_normal((n_blocks, ELEMS)).astype(dtype)
    for first in range(0, n_blocks, LANES):
        out = np.empty((ELEMS, LANES), np.float32)
        load_all(as_source(rows), first, out.reshape(-1))
        blocks = np.minimum(np.arange(first, first + LANES), n_blocks - 1)
        np.testing.assert_array_equal(out, rows[blocks].T.astype(np.float32))


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("block", [0, 5, LANES, LANES + 2])
def test_a_tile_tells_where_it_is_not_finite(dtype: npt.DTypeLike, bad: float, block: int) -> None:
    n_blocks = LANES + 3
    rows = np.full((n_blocks, ELEMS), np.finfo(np.float16).max, dtype)
    assert [find_not_finite(as_source(rows), first, n_blocks) for first in (0, LANES)] == [-1, -1]
    rows[block, 7] = bad
    rows[-1] = bad
    found = [find_not_finite(as_source(rows), first, n_blocks) for first in (0, LANES)]
    assert found == ([block, n_blocks - 1] if block < LANES else [-1, block])


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_a_source_is_a_read_only_view(dtype: npt.DTypeLike) -> None:
    rows = np.ones((3, ELEMS), dtype)
    source = as_source(rows)
    assert np.shares_memory(source, rows)
    assert not source.flags.writeable
    assert rows.flags.writeable
    assert source.dtype == as_source(np.broadcast_to(rows[0], rows.shape)).dtype


@pytest.mark.parametrize("per_row", [1, 3, LANES, LANES + 3])
def test_importances_follow_the_columns(per_row: int) -> None:
    importances = np.arange(per_row * ELEMS, dtype=np.float32)
    for first in (0, LANES, 5 * LANES):
        out = np.empty((ELEMS, LANES), np.float32)
        load_all_importances(importances, first, out.reshape(-1))
        blocks = np.arange(first, first + LANES) % per_row
        np.testing.assert_array_equal(out, importances.reshape(per_row, ELEMS)[blocks].T)


@pytest.mark.parametrize("block_bytes", [34, 64, 110, 128])
@pytest.mark.parametrize("n_blocks", [1, LANES, LANES + 3])
def test_stored_blocks_end_where_the_array_ends(block_bytes: int, n_blocks: int) -> None:
    n_words = padded_words(block_bytes)

    @inlinable
    def copy(source: Array, out: Array) -> None:
        tile, words = float_tile(128), int_tile(n_words)
        for first in range(0, out.size // block_bytes, LANES):
            load_blocks(source, first, 128, tile)
            for k in range((block_bytes + 3) // 4):
                words[k] = bits(tile[k])
            store_blocks(words, out, first, block_bytes)

    rng = np.random.default_rng(2)
    padded = rng.integers(0, 2**31, (n_blocks, 128)).astype(np.uint32)
    memory = np.full(n_blocks * block_bytes + 64, 0xEE, np.uint8)
    copy(padded.view(np.float32).reshape(-1), memory[: n_blocks * block_bytes])
    expected = padded.view(np.uint8)[:, :block_bytes]
    np.testing.assert_array_equal(memory[: n_blocks * block_bytes].reshape(n_blocks, -1), expected)
    assert (memory[n_blocks * block_bytes :] == 0xEE).all()


@pytest.mark.parametrize(
    ("bits_", "group_bytes"), [(1, 32), (2, 4), (2, 32), (4, 8), (4, 32), (4, 64), (8, 16)]
)
def test_packed_codes_unpack(bits_: int, group_bytes: int) -> None:
    n_bytes = 2 * group_bytes
    n_codes, n_words = n_bytes * 8 // bits_, padded_words(n_bytes)

    @inlinable
    def pack_all(source: Array, out: Array) -> None:
        tile, codes, words = float_tile(512), int_tile(512), int_tile(n_words)
        load_blocks(source, 0, n_codes, tile)
        for i in range(n_codes):
            codes[i] = bits(tile[i])
        pack(codes, 0, bits_, group_bytes, n_bytes, words)
        store_blocks(words, out, 0, n_bytes)

    codes = np.random.default_rng(3).integers(0, 1 << bits_, (LANES, n_codes)).astype(np.uint32)
    out = np.empty(LANES * n_bytes, np.uint8)
    pack_all(codes.view(np.float32).reshape(-1), out)
    np.testing.assert_array_equal(unpack(out.reshape(LANES, n_bytes), bits_, group_bytes), codes)
