"""IQ2_XS: 256 weights in 74 bytes, 2.3125 bits each.

    bytes       field
    0 .. 1      d       float16
    2 .. 65     qs      16 bits for each group of 8 weights:
                        bits 0 .. 8   the index of a point of the grid IQ2_XS
                        bits 9 .. 15  the signs of weights 0 .. 6; that of weight 7 makes their count even
    66 .. 73    scales  4 bits for each sub-block of 16: two in a byte, the lower bits first

The value of weight i, in a sub-block with scale sc, where v is 8, 25 or 43 by the grid point's level:

    +-d * (0.5 + sc) * 0.25 * v

Encoding fails with BadWeights where ggml aborts: when squared errors are beyond float32, which takes
weights around 1e19 or importances near float32's largest.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from gguf_tools.format.ggml_types import IQ2_XS
from quantize.formats.base import Bytes, Floats32, QuantFormat, Rows, as_blocks, block_dtype, encode_blocks
from quantize.formats.iq import grids
from quantize.formats.iq.grid_blocks import SubBlock, code_scales, join_halves, load_sub_block
from quantize.formats.iq.grids import GridTables, tables
from quantize.formats.iq.grids.cached_search_4 import Answers
from quantize.formats.iq.iq2 import decode_points, pack_nibbles, search_16, with_even_signs
from quantize.formats.k_quants.super_block import mean_square, weigh
from quantize.formats.search import EMPTY
from quantize.importances.weighting import Weighting
from quantize.simd.floats import to_half_bits
from quantize.simd.kernel import kernel
from quantize.simd.lane_memory import float_tile, int_tile, tail
from quantize.simd.lanes import LANES, any_lane, select
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

BLOCK = block_dtype(IQ2_XS)


def encode(rows: Rows, weighting: Weighting | None) -> Bytes:
    """Return `rows` as IQ2_XS, the bytes of ggml's quantize_iq2_xs."""
    return encode_blocks(rows, weighting, IQ2_XS, weighted=_quantize, tables=(tables(grids.IQ2_XS, EIGHT),))


def decode(data: Bytes, n_cols: int) -> Floats32:
    """Return the weights of rows of IQ2_XS."""
    blocks = as_blocks(data, n_cols, IQ2_XS, BLOCK)
    codes = blocks["qs"]
    scales = unpack(blocks["scales"], bits=4, group_bytes=1)
    weights = decode_points(grids.IQ2_XS, blocks["d"], scales, codes & 0x1FF, with_even_signs(codes >> 9))
    return weights.reshape(len(data), n_cols)


_BYTES = BLOCK.itemsize
_WORDS = padded_words(_BYTES)
_HALVES = _BYTES // 2
_PADDED_HALVES = _HALVES + 1
_SIGNS = 0x7F


@kernel
def _quantize(
    source: Rows, importances: npt.NDArray[np.float32], grid: GridTables, out: npt.NDArray[np.uint8]
) -> int:
    x, weights, sums = float_tile(256), float_tile(256), float_tile(16)
    scales, scale_codes = float_tile(16), int_tile(16)
    sub = SubBlock(float_tile(32), float_tile(32), float_tile(32), float_tile(32))
    answers = Answers(int_tile(2), int_tile(2), int_tile(2), int_tile(2), float_tile(2), float_tile(2))
    signs, indices = int_tile(2), int_tile(2)
    halves, words = int_tile(_PADDED_HALVES), int_tile(_WORDS)
    for first in range(0, out.size // _BYTES, LANES):
        if not load_blocks(source, first, 256, x):
            return first_not_finite(x, 256, first, out.size // _BYTES)
        load_importances(importances, first, 256, weights)
        weigh(x, weights, mean_square(x, np.float32(1)), 16, sums)
        for j in range(16):
            load_sub_block(tail(x, 16 * j), tail(weights, 16 * j), 16, True, sub, signs)
            scales[j], failed = search_16(grid, sub, answers, EMPTY, _SIGNS, indices, signs)
            if any_lane(failed):
                return first_failure(failed, first, out.size // _BYTES)
            for k in range(2):
                halves[1 + 2 * j + k] = indices[k] | signs[k] << 9
        d, nothing = code_scales(scales, 16, 15, scale_codes)
        halves[0] = to_half_bits(d)
        for k in range(1, 33):
            halves[k] = select(nothing, 0, halves[k])
        pack_nibbles(scale_codes, tail(halves, 33))
        join_halves(halves, _HALVES, words)
        store_blocks(words, out, first, _BYTES)
    return -1


FORMAT = QuantFormat(IQ2_XS, encode, decode)
