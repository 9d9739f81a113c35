"""IQ2_S: 256 weights in 82 bytes, 2.5625 bits each.

    bytes       field
    0 .. 1      d       float16
    2 .. 33     qs      bits 0 .. 7 of the index of a point of the grid IQ2_S, for each group of 8 weights
    34 .. 65    signs   bit i of byte k: whether weight i of group k is negative
    66 .. 73    qh      bits 8 .. 9 of the indices: four in a byte, the lowest bits first
    74 .. 81    scales  4 bits for each sub-block of 16: two in a byte, the lower bits first

The value of weight i, in a sub-block with scale sc, where v is 8, 25 or 43 by the grid point's level:

    +-d * (0.5 + sc) * 0.25 * v

Encoding fails with BadWeights where ggml aborts: when squared errors are beyond float32, which takes
weights around 1e19 or importances near float32's largest.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from gguf_tools.format.ggml_types import IQ2_S
from quantize.formats.base import Bytes, Floats32, QuantFormat, Rows, as_blocks, block_dtype, encode_blocks
from quantize.formats.iq import grids
from quantize.formats.iq.grid_blocks import SubBlock, code_scales, join_halves, load_sub_block
from quantize.formats.iq.grids import GridTables, tables
from quantize.formats.iq.grids.cached_search_4 import Answers
from quantize.formats.iq.iq2 import decode_points, pack_nibbles, search_16
from quantize.formats.k_quants.super_block import mean_square, weigh
from quantize.importances.weighting import Weighting
from quantize.simd.floats import QUARTER, to_half_bits
from quantize.simd.kernel import inlinable, kernel
from quantize.simd.lane_memory import FloatTile, float_tile, int_tile, tail
from quantize.simd.lanes import LANES, Mask, any_lane, splat
from quantize.simd.octets import EIGHT
from quantize.simd.packing import unpack
from quantize.simd.tiles import (
    first_failure,
    first_not_finite,
    load_blocks,
    load_importances,
    padded_words,
    store_blocks,
)

BLOCK = block_dtype(IQ2_S)


def encode(rows: Rows, weighting: Weighting | None) -> Bytes:
    """Return `rows` as IQ2_S, the bytes of ggml's quantize_iq2_s."""
    return encode_blocks(
        rows, weighting, IQ2_S, _quantize_plain, _quantize_weighted, (tables(grids.IQ2_S, EIGHT),)
    )


def decode(data: Bytes, n_cols: int) -> Floats32:
    """Return the weights of rows of IQ2_S."""
    blocks = as_blocks(data, n_cols, IQ2_S, BLOCK)
    indices = blocks["qs"] | unpack(blocks["qh"], bits=2, group_bytes=1).astype(np.int64) << 8
    scales = unpack(blocks["scales"], bits=4, group_bytes=1)
    weights = decode_points(grids.IQ2_S, blocks["d"], scales, indices, blocks["signs"])
    return weights.reshape(len(data), n_cols)


_BYTES = BLOCK.itemsize
_WORDS = padded_words(_BYTES)
_HALVES = _BYTES // 2
_PADDED_HALVES = _HALVES + 1
_EMPTY = np.float32(1e-8)
_SHRINK = np.float32(0.9875)  # the stored scale is a little smaller than the one that codes the scales
_SIGNS = 0xFF


@kernel
def _quantize_weighted(
    source: Rows, importances: npt.NDArray[np.float32], grid: GridTables, out: npt.NDArray[np.uint8]
) -> int:
    x, weights, sums = float_tile(256), float_tile(256), float_tile(16)
    for first in range(0, out.size // _BYTES, LANES):
        if not load_blocks(source, first, 256, x):
            return first_not_finite(x, 256, first, out.size // _BYTES)
        load_importances(importances, first, 256, weights)
        weigh(x, weights, mean_square(x, np.float32(2)), 16, sums)
        failed = _encode(x, weights, grid, out, first)
        if any_lane(failed):
            return first_failure(failed, first, out.size // _BYTES)
    return -1


@kernel
def _quantize_plain(source: Rows, grid: GridTables, out: npt.NDArray[np.uint8]) -> int:
    x, weights = float_tile(256), float_tile(256)
    for first in range(0, out.size // _BYTES, LANES):
        if not load_blocks(source, first, 256, x):
            return first_not_finite(x, 256, first, out.size // _BYTES)
        spread = QUARTER * mean_square(x, np.float32(2))
        for i in range(256):
            weights[i] = spread + x[i] * x[i]
        failed = _encode(x, weights, grid, out, first)
        if any_lane(failed):
            return first_failure(failed, first, out.size // _BYTES)
    return -1


@inlinable
def _encode(
    x: FloatTile, weights: FloatTile, grid: GridTables, out: npt.NDArray[np.uint8], first: int
) -> Mask:
    """Encode and store a tile of blocks; return which ones failed."""
    scales, scale_codes = float_tile(16), int_tile(16)
    sub = SubBlock(float_tile(32), float_tile(32), float_tile(32), float_tile(32))
    answers = Answers(int_tile(2), int_tile(2), int_tile(2), int_tile(2), float_tile(2), float_tile(2))
    signs, indices = int_tile(32), int_tile(32)
    halves, words = int_tile(_PADDED_HALVES), int_tile(_WORDS)
    failed = x[0] != x[0]
    for j in range(16):
        sub_signs, sub_indices = tail(signs, 2 * j), tail(indices, 2 * j)
        load_sub_block(tail(x, 16 * j), tail(weights, 16 * j), 16, False, sub, sub_signs)
        scales[j], failed_here = search_16(grid, sub, answers, _EMPTY, _SIGNS, sub_indices, sub_signs)
        failed |= failed_here
    d, _nothing = code_scales(scales, 16, 15, scale_codes)
    halves[0] = to_half_bits(d * _SHRINK)
    for k in range(16):
        halves[1 + k] = indices[2 * k] & 0xFF | (indices[2 * k + 1] & 0xFF) << 8
        halves[17 + k] = signs[2 * k] | signs[2 * k + 1] << 8
    for k in range(4):
        halves[33 + k] = splat(0)
        for i in range(8):
            halves[33 + k] = halves[33 + k] | indices[8 * k + i] >> 8 << 2 * i
    pack_nibbles(scale_codes, tail(halves, 37))
    join_halves(halves, _HALVES, words)
    store_blocks(words, out, first, _BYTES)
    return failed


FORMAT = QuantFormat(IQ2_S, encode, decode)
