"""IQ2_XXS: 256 weights in 66 bytes, 2.0625 bits each.

    bytes       field
    0 .. 1      d    float16
    2 .. 65     qs   8 bytes for each sub-block of 32 weights, which is 4 groups of 8:
                     bytes 0 .. 3  the indices of points of the grid IQ2_XXS
                     bytes 4 .. 7  a little-endian number: bits 7 * k .. 7 * k + 6 are the signs of weights
                                   0 .. 6 of group k, that of weight 7 makes their count even; bits 28 .. 31
                                   are the scale

The value of weight i, in a sub-block with scale sc, where v is 8, 25 or 43 by the grid point's level:

    +-d * (0.5 + sc) * 0.25 * v

Encoding fails with BadWeights where ggml aborts: when squared errors are beyond float32, which takes
weights around 1e19 or importances near float32's largest.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from gguf_tools.format.ggml_types import IQ2_XXS
from quantize.formats.base import Bytes, Floats32, QuantFormat, Rows, as_blocks, encode_blocks
from quantize.formats.iq import grids
from quantize.formats.iq.grid_blocks import SubBlock, code_scales, join_halves, load_sub_block
from quantize.formats.iq.grids import GridTables, tables
from quantize.formats.iq.grids.cached_search_4 import Answers
from quantize.formats.iq.iq2 import (
    IQ2Search,
    decode_points,
    finish,
    search_again,
    search_candidates,
    with_even_signs,
)
from quantize.formats.k_quants.super_block import mean_square, weigh
from quantize.formats.search import EMPTY, search_positive
from quantize.importances.weighting import Weighting
from quantize.simd.floats import ZERO, to_half_bits
from quantize.simd.kernel import inlinable, kernel
from quantize.simd.lane_memory import IntTile, float_tile, int_tile, tail
from quantize.simd.lanes import LANES, Floats, Mask, any_lane, maximum, select, splat
from quantize.simd.octets import EIGHT
from quantize.simd.tiles import (
    first_failure,
    first_not_finite,
    load_blocks,
    load_importances,
    padded_words,
    store_blocks,
)

BLOCK = np.dtype([("d", "<u2"), ("qs", [("indices", "u1", 4), ("signs_scale", "<u4")], 8)])


def encode(rows: Rows, weighting: Weighting | None) -> Bytes:
    """Return `rows` as IQ2_XXS, the bytes of ggml's quantize_iq2_xxs."""
    return encode_blocks(rows, weighting, IQ2_XXS, weighted=_quantize, tables=(tables(grids.IQ2_XXS, EIGHT),))


def decode(data: Bytes, n_cols: int) -> Floats32:
    """Return the weights of rows of IQ2_XXS."""
    blocks = as_blocks(data, n_cols, IQ2_XXS, BLOCK)
    packed = blocks["qs"]["signs_scale"]
    signs = with_even_signs(packed[:, :, None] >> np.array([0, 7, 14, 21], np.uint32)).reshape(-1, 32)
    scales = (packed >> 28).astype(np.uint8)
    indices = blocks["qs"]["indices"].reshape(-1, 32)
    weights = decode_points(grids.IQ2_XXS, blocks["d"], scales, indices, signs)
    return weights.reshape(len(data), n_cols)


_BYTES = BLOCK.itemsize
_WORDS = padded_words(_BYTES)
_HALVES = _BYTES // 2
_PADDED_HALVES = _HALVES + 1
_TOP = 4
_SIGNS = 0x7F
_THREE = np.float32(3)


@kernel
def _quantize(
    source: Rows, importances: npt.NDArray[np.float32], grid: GridTables, out: npt.NDArray[np.uint8]
) -> int:
    x, weights, sums = float_tile(256), float_tile(256), float_tile(8)
    scales, scale_codes = float_tile(8), int_tile(8)
    sub = SubBlock(float_tile(32), float_tile(32), float_tile(32), float_tile(32))
    answers = Answers(int_tile(4), int_tile(4), int_tile(4), int_tile(4), float_tile(4), float_tile(4))
    signs, indices = int_tile(4), int_tile(4)
    halves, words = int_tile(_PADDED_HALVES), int_tile(_WORDS)
    for first in range(0, out.size // _BYTES, LANES):
        if not load_blocks(source, first, 256, x):
            return first_not_finite(x, 256, first, out.size // _BYTES)
        load_importances(importances, first, 256, weights)
        weigh(x, weights, mean_square(x, np.float32(1)), 32, sums)
        for j in range(8):
            load_sub_block(tail(x, 32 * j), tail(weights, 32 * j), 32, True, sub, signs)
            scales[j], failed = _search(grid, sub, answers, indices, signs)
            if any_lane(failed):
                return first_failure(failed, first, out.size // _BYTES)
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
        join_halves(halves, _HALVES, words)
        store_blocks(words, out, first, _BYTES)
    return -1


@inlinable
def _search(
    grid: GridTables, sub: SubBlock, answers: Answers, indices: IntTile, signs: IntTile
) -> tuple[Floats, Mask]:
    """Return the scale of a sub-block of 32 and where there is none; fill its indices, and amend its signs.

    The largest magnitude to be coded is that of a fit without a grid, to the levels 0 .. 4.
    """
    codes, moved = int_tile(32), int_tile(4)
    largest = sub.x[0]
    for i in range(1, 32):
        largest = maximum(largest, sub.x[i])
    scale = search_positive(sub.x, sub.weights, codes, 32, _TOP)
    top = scale * _THREE
    active = ~(largest < EMPTY) & ~(top <= ZERO)
    for k in range(4):
        indices[k] = splat(0)
    search = IQ2Search(sub, answers, indices, moved)
    scale, failed = search_candidates(grid, search, 32, 6, top, active, scale)
    for k in range(4):
        moved[k] = splat(1)
    scale, failed_again = search_again(grid, search, 32, scale)
    return finish(grid, 32, scale, active, failed | failed_again, indices, signs, _SIGNS)


FORMAT = QuantFormat(IQ2_XXS, encode, decode)
