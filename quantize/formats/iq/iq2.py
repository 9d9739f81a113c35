"""IQ2_XXS, IQ2_XS and IQ2_S: signs apart, and three levels, eight at a time from a grid.

Encoding fails with BadWeights where ggml aborts: when squared errors are beyond float32, which takes weights
around 1e19 or importances near float32's largest.
"""

from __future__ import annotations

import numpy as np

from gguf_tools.format.ggml_types import IQ2_S, IQ2_XS, IQ2_XXS
from quantize.formats.base import Bytes, Floats32, QuantFormat, Rows, as_blocks, block_dtype, encode_blocks
from quantize.formats.iq import grids
from quantize.formats.iq.grid_blocks import (
    SubBlock,
    code_scales,
    join_halves,
    load_sub_block,
    plain_grid_kernel,
    weighted_grid_kernel,
)
from quantize.formats.iq.grids import GridTables, tables
from quantize.formats.iq.grids.cached_search_4 import Answers
from quantize.formats.iq.iq2_search import (
    IQ2Search,
    decode_points,
    finish,
    pack_nibbles,
    search_16,
    search_again,
    search_candidates,
    with_even_signs,
)
from quantize.formats.k_quants.super_block import mean_square, weigh
from quantize.formats.search import EMPTY, search_positive
from quantize.importances.weighting import Weighting
from quantize.simd.floats import QUARTER, ZERO, to_half_bits
from quantize.simd.kernel import inlinable
from quantize.simd.lane_memory import FloatTile, IntTile, float_tile, int_tile, tail
from quantize.simd.lanes import Floats, Mask, any_lane, maximum, select, splat
from quantize.simd.octets import EIGHT
from quantize.simd.packing import unpack

# ---- IQ2_XXS

IQ2_XXS_BLOCK = np.dtype([("d", "<u2"), ("qs", [("indices", "u1", 4), ("signs_scale", "<u4")], 8)])


def encode_iq2_xxs(rows: Rows, weighting: Weighting | None) -> Bytes:
    """Return `rows` as IQ2_XXS, the bytes of ggml's quantize_iq2_xxs."""
    return encode_blocks(
        rows, weighting, IQ2_XXS, weighted=_quantize_iq2_xxs, tables=(tables(grids.IQ2_XXS, EIGHT),)
    )


def decode_iq2_xxs(data: Bytes, n_cols: int) -> Floats32:
    """Decode IQ2_XXS: 256 weights in 66 bytes, 2.0625 bits each.

        bytes       field
        0 .. 1      d    float16
        2 .. 65     qs   8 bytes for each sub-block of 32 weights, which is 4 groups of 8:
                         bytes 0 .. 3  the indices of points of the grid IQ2_XXS
                         bytes 4 .. 7  a little-endian number: bits 7 * k .. 7 * k + 6 are the signs of
                                       weights 0 .. 6 of group k, that of weight 7 makes their count even;
                                       bits 28 .. 31 are the scale

    The value of weight i, in a sub-block with scale sc, where v is 8, 25 or 43 by the grid point's level:

        +-d * (0.5 + sc) * 0.25 * v
    """
    blocks = as_blocks(data, n_cols, IQ2_XXS, IQ2_XXS_BLOCK)
    packed = blocks["qs"]["signs_scale"]
    signs = with_even_signs(packed[:, :, None] >> np.array([0, 7, 14, 21], np.uint32)).reshape(-1, 32)
    scales = (packed >> 28).astype(np.uint8)
    indices = blocks["qs"]["indices"].reshape(-1, 32)
    weights = decode_points(grids.IQ2_XXS, blocks["d"], scales, indices, signs)
    return weights.reshape(len(data), n_cols)


_IQ2_XXS_BYTES = IQ2_XXS_BLOCK.itemsize
_IQ2_XXS_HALVES = _IQ2_XXS_BYTES // 2
_IQ2_XXS_PADDED_HALVES = _IQ2_XXS_HALVES + 1
_IQ2_XXS_TOP = 4
_IQ2_XXS_SIGNS = 0x7F
_THREE = np.float32(3)


@weighted_grid_kernel(IQ2_XXS)
def _quantize_iq2_xxs(grid: GridTables, x: FloatTile, weights: FloatTile, words: IntTile) -> Mask:
    sums = float_tile(8)
    scales, scale_codes = float_tile(8), int_tile(8)
    sub = SubBlock(float_tile(32), float_tile(32), float_tile(32), float_tile(32))
    answers = Answers(int_tile(4), int_tile(4), int_tile(4), int_tile(4), float_tile(4), float_tile(4))
    signs, indices = int_tile(4), int_tile(4)
    halves = int_tile(_IQ2_XXS_PADDED_HALVES)
    weigh(x, weights, mean_square(x, np.float32(1)), 32, sums)
    for j in range(8):
        load_sub_block(tail(x, 32 * j), tail(weights, 32 * j), 32, True, sub, signs)
        scales[j], failed = _search_iq2_xxs(grid, sub, answers, indices, signs)
        if any_lane(failed):
            return failed
        packed = signs[0] | signs[1] << 7 | signs[2] << 14 | signs[3] << 21
        halves[1 + 4 * j] = indices[0] | indices[1] << 8
        halves[2 + 4 * j] = indices[2] | indices[3] << 8
        halves[3 + 4 * j] = packed & 0xFFFF
        halves[4 + 4 * j] = packed >> 16
    d, nothing = code_scales(scales, 8, 15, scale_codes)
    halves[0] = to_half_bits(d)
    for j in range(8):
        halves[4 + 4 * j] = halves[4 + 4 * j] | scale_codes[j] << 12
    for k in range(1, 33):
        halves[k] = select(nothing, 0, halves[k])
    join_halves(halves, _IQ2_XXS_HALVES, words)
    return failed


@inlinable
def _search_iq2_xxs(
    grid: GridTables, sub: SubBlock, answers: Answers, indices: IntTile, signs: IntTile
) -> tuple[Floats, Mask]:
    """Return the scale of a sub-block of 32 and where there is none; fill its indices, and amend its signs.

    The largest magnitude to be coded is that of a fit without a grid, to the levels 0 .. 4.
    """
    codes, moved = int_tile(32), int_tile(4)
    largest = sub.x[0]
    for i in range(1, 32):
        largest = maximum(largest, sub.x[i])
    scale = search_positive(sub.x, sub.weights, codes, 32, _IQ2_XXS_TOP)
    top = scale * _THREE
    active = ~(largest < EMPTY) & ~(top <= ZERO)
    for k in range(4):
        indices[k] = splat(0)
    search = IQ2Search(sub, answers, indices, moved)
    scale, failed = search_candidates(grid, search, 32, 6, top, active, scale)
    for k in range(4):
        moved[k] = splat(1)
    scale, failed_again = search_again(grid, search, 32, scale)
    return finish(grid, 32, scale, active, failed | failed_again, indices, signs, _IQ2_XXS_SIGNS)


# ---- IQ2_XS

_IQ2_XS_BLOCK = block_dtype(IQ2_XS)


def encode_iq2_xs(rows: Rows, weighting: Weighting | None) -> Bytes:
    """Return `rows` as IQ2_XS, the bytes of ggml's quantize_iq2_xs."""
    return encode_blocks(
        rows, weighting, IQ2_XS, weighted=_quantize_iq2_xs, tables=(tables(grids.IQ2_XS, EIGHT),)
    )


def decode_iq2_xs(data: Bytes, n_cols: int) -> Floats32:
    """Decode IQ2_XS: 256 weights in 74 bytes, 2.3125 bits each.

        bytes       field
        0 .. 1      d       float16
        2 .. 65     qs      16 bits for each group of 8 weights:
                            bits 0 .. 8   the index of a point of the grid IQ2_XS
                            bits 9 .. 15  the signs of weights 0 .. 6; that of weight 7 makes their count even
        66 .. 73    scales  4 bits for each sub-block of 16: two in a byte, the lower bits first

    The value of weight i, in a sub-block with scale sc, where v is 8, 25 or 43 by the grid point's level:

        +-d * (0.5 + sc) * 0.25 * v
    """
    blocks = as_blocks(data, n_cols, IQ2_XS, _IQ2_XS_BLOCK)
    codes = blocks["qs"]
    scales = unpack(blocks["scales"], bits=4, group_bytes=1)
    weights = decode_points(grids.IQ2_XS, blocks["d"], scales, codes & 0x1FF, with_even_signs(codes >> 9))
    return weights.reshape(len(data), n_cols)


_IQ2_XS_BYTES = _IQ2_XS_BLOCK.itemsize
_IQ2_XS_HALVES = _IQ2_XS_BYTES // 2
_IQ2_XS_PADDED_HALVES = _IQ2_XS_HALVES + 1
_IQ2_XS_SIGNS = 0x7F


@weighted_grid_kernel(IQ2_XS)
def _quantize_iq2_xs(grid: GridTables, x: FloatTile, weights: FloatTile, words: IntTile) -> Mask:
    sums = float_tile(16)
    scales, scale_codes = float_tile(16), int_tile(16)
    sub = SubBlock(float_tile(32), float_tile(32), float_tile(32), float_tile(32))
    answers = Answers(int_tile(2), int_tile(2), int_tile(2), int_tile(2), float_tile(2), float_tile(2))
    signs, indices = int_tile(2), int_tile(2)
    halves = int_tile(_IQ2_XS_PADDED_HALVES)
    weigh(x, weights, mean_square(x, np.float32(1)), 16, sums)
    for j in range(16):
        load_sub_block(tail(x, 16 * j), tail(weights, 16 * j), 16, True, sub, signs)
        scales[j], failed = search_16(grid, sub, answers, EMPTY, _IQ2_XS_SIGNS, indices, signs)
        if any_lane(failed):
            return failed
        for k in range(2):
            halves[1 + 2 * j + k] = indices[k] | signs[k] << 9
    d, nothing = code_scales(scales, 16, 15, scale_codes)
    halves[0] = to_half_bits(d)
    for k in range(1, 33):
        halves[k] = select(nothing, 0, halves[k])
    pack_nibbles(scale_codes, tail(halves, 33))
    join_halves(halves, _IQ2_XS_HALVES, words)
    return failed


# ---- IQ2_S

_IQ2_S_BLOCK = block_dtype(IQ2_S)


def encode_iq2_s(rows: Rows, weighting: Weighting | None) -> Bytes:
    """Return `rows` as IQ2_S, the bytes of ggml's quantize_iq2_s."""
    return encode_blocks(
        rows, weighting, IQ2_S, _quantize_plain_iq2_s, _quantize_weighted_iq2_s, (tables(grids.IQ2_S, EIGHT),)
    )


def decode_iq2_s(data: Bytes, n_cols: int) -> Floats32:
    """Decode IQ2_S: 256 weights in 82 bytes, 2.5625 bits each.

        bytes       field
        0 .. 1      d       float16
        2 .. 33     qs      bits 0 .. 7 of the index of a point of the grid IQ2_S, for each group of 8 weights
        34 .. 65    signs   bit i of byte k: whether weight i of group k is negative
        66 .. 73    qh      bits 8 .. 9 of the indices: four in a byte, the lowest bits first
        74 .. 81    scales  4 bits for each sub-block of 16: two in a byte, the lower bits first

    The value of weight i, in a sub-block with scale sc, where v is 8, 25 or 43 by the grid point's level:

        +-d * (0.5 + sc) * 0.25 * v
    """
    blocks = as_blocks(data, n_cols, IQ2_S, _IQ2_S_BLOCK)
    indices = blocks["qs"] | unpack(blocks["qh"], bits=2, group_bytes=1).astype(np.int64) << 8
    scales = unpack(blocks["scales"], bits=4, group_bytes=1)
    weights = decode_points(grids.IQ2_S, blocks["d"], scales, indices, blocks["signs"])
    return weights.reshape(len(data), n_cols)


_IQ2_S_BYTES = _IQ2_S_BLOCK.itemsize
_IQ2_S_HALVES = _IQ2_S_BYTES // 2
_IQ2_S_PADDED_HALVES = _IQ2_S_HALVES + 1
_IQ2_S_EMPTY = np.float32(1e-8)
_IQ2_S_SHRINK = np.float32(0.9875)  # the stored scale is a little smaller than the one that codes the scales
_IQ2_S_SIGNS = 0xFF


@weighted_grid_kernel(IQ2_S)
def _quantize_weighted_iq2_s(grid: GridTables, x: FloatTile, weights: FloatTile, words: IntTile) -> Mask:
    sums = float_tile(16)
    weigh(x, weights, mean_square(x, np.float32(2)), 16, sums)
    return _encode_iq2_s(x, weights, grid, words)


@plain_grid_kernel(IQ2_S)
def _quantize_plain_iq2_s(grid: GridTables, x: FloatTile, words: IntTile) -> Mask:
    weights = float_tile(256)
    spread = QUARTER * mean_square(x, np.float32(2))
    for i in range(256):
        weights[i] = spread + x[i] * x[i]
    return _encode_iq2_s(x, weights, grid, words)


@inlinable
def _encode_iq2_s(x: FloatTile, weights: FloatTile, grid: GridTables, words: IntTile) -> Mask:
    """Fill `words` with the blocks of a tile; return which ones failed."""
    scales, scale_codes = float_tile(16), int_tile(16)
    sub = SubBlock(float_tile(32), float_tile(32), float_tile(32), float_tile(32))
    answers = Answers(int_tile(2), int_tile(2), int_tile(2), int_tile(2), float_tile(2), float_tile(2))
    signs, indices = int_tile(32), int_tile(32)
    halves = int_tile(_IQ2_S_PADDED_HALVES)
    failed = x[0] != x[0]
    for j in range(16):
        sub_signs, sub_indices = tail(signs, 2 * j), tail(indices, 2 * j)
        load_sub_block(tail(x, 16 * j), tail(weights, 16 * j), 16, False, sub, sub_signs)
        scales[j], failed_here = search_16(
            grid, sub, answers, _IQ2_S_EMPTY, _IQ2_S_SIGNS, sub_indices, sub_signs
        )
        failed |= failed_here
    d, _nothing = code_scales(scales, 16, 15, scale_codes)
    halves[0] = to_half_bits(d * _IQ2_S_SHRINK)
    for k in range(16):
        halves[1 + k] = indices[2 * k] & 0xFF | (indices[2 * k + 1] & 0xFF) << 8
        halves[17 + k] = signs[2 * k] | signs[2 * k + 1] << 8
    for k in range(4):
        halves[33 + k] = splat(0)
        for i in range(8):
            halves[33 + k] = halves[33 + k] | indices[8 * k + i] >> 8 << 2 * i
    pack_nibbles(scale_codes, tail(halves, 37))
    join_halves(halves, _IQ2_S_HALVES, words)
    return failed


FORMATS = (
    QuantFormat(IQ2_XXS, encode_iq2_xxs, decode_iq2_xxs),
    QuantFormat(IQ2_XS, encode_iq2_xs, decode_iq2_xs),
    QuantFormat(IQ2_S, encode_iq2_s, decode_iq2_s),
)
