"""The kernels of types that take the nearest of some levels: over rows, and over the super-blocks of rows.

A type says how its codes, the integers of its sub-blocks and their sets are packed. The rest is the same for
all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from gguf_tools.format.ggml_types import GGMLType
from quantize.formats.base import Bytes, Floats32
from quantize.formats.ik.levels.levels import SUPER_ELEMS
from quantize.formats.ik.levels.scale_search import Coding, Fitted, Group, LaneRows, Search, fitting
from quantize.formats.ik.rows import first_infinite, store_in_rows
from quantize.simd.floats import to_half_bits
from quantize.simd.kernel import inlinable
from quantize.simd.lane_memory import IntTile, float_tile, int_tile, load, store, tail
from quantize.simd.lanes import LANES, Ints, splat, to_int
from quantize.simd.tiles import load_columns, padded_words


class SuperBlock(NamedTuple):
    """Codes of LANES rows, Ints (256), and for each sub-block its integer and its set, Ints (16)."""

    codes: IntTile
    integers: IntTile
    seconds: IntTile


def row_quantizer(search: Search, coding: Coding, type_: GGMLType, pack_block: Callable[..., None]) -> Any:
    """Return the function of kernels that encodes rows, each with a scale of its own.

        quantize_rows(source, importances, scales, out) -> int, as `rows.encode_scaled_rows` has it

    pack_block  called as pack_block(codes, integers, seconds, words), to fill `words` with a super-block
    """
    fit_group, code_super_block = fitting(search, coding), _super_block_coder(search, coding)
    block_bytes, meta_bytes = type_.block_bytes, type_.row_meta_bytes
    n_words, size = padded_words(block_bytes), search.size

    @inlinable
    def quantize_rows(source: Floats32, importances: Floats32, scales: Floats32, out: Bytes) -> int:
        n_cols, n_rows = importances.size, scales.size
        block = SuperBlock(int_tile(SUPER_ELEMS), int_tile(16), int_tile(16))
        words = int_tile(n_words)
        n_fitted = n_cols // size * LANES
        fitted = Fitted(np.empty(n_fitted, np.float32), np.empty(n_fitted, np.float32))
        of_rows = np.empty(LANES, np.float32)
        for first in range(0, n_rows, LANES):
            rows = LaneRows(source, importances, first)
            group = fit_group(rows, 0, n_cols, fitted)
            failure = first_infinite(group.d, first)
            if failure >= 0:
                return failure
            store(of_rows, 0, group.d)
            for row in range(first, min(first + LANES, n_rows)):
                scales[row] = of_rows[row - first]
            for k in range(n_cols // SUPER_ELEMS):
                column = k * SUPER_ELEMS
                code_super_block(rows, column, group, fitted, column // size, block)
                pack_block(block.codes, block.integers, block.seconds, words)
                store_in_rows(words, block_bytes, meta_bytes + k * block_bytes, first, out, n_rows)
        return -1

    return quantize_rows


def block_quantizer(search: Search, coding: Coding, type_: GGMLType, pack_block: Callable[..., None]) -> Any:
    """Return the function of kernels that encodes super-blocks, each with a float16 of its own.

        quantize_blocks(source, importances, out) -> int, as `rows.encode_rows` has it

    pack_block  called as pack_block(half_d, codes, integers, seconds, words)
    """
    fit_group, code_super_block = fitting(search, coding), _super_block_coder(search, coding)
    block_bytes, n_fitted = type_.block_bytes, SUPER_ELEMS // search.size * LANES
    n_words = padded_words(block_bytes)

    @inlinable
    def quantize_blocks(source: Floats32, importances: Floats32, out: Bytes) -> int:
        n_cols = importances.size
        n_rows = source.size // n_cols
        block = SuperBlock(int_tile(SUPER_ELEMS), int_tile(16), int_tile(16))
        words = int_tile(n_words)
        fitted = Fitted(np.empty(n_fitted, np.float32), np.empty(n_fitted, np.float32))
        for first in range(0, n_rows, LANES):
            rows = LaneRows(source, importances, first)
            for k in range(n_cols // SUPER_ELEMS):
                column = k * SUPER_ELEMS
                group = fit_group(rows, column, SUPER_ELEMS, fitted)
                failure = first_infinite(group.d, first)
                if failure >= 0:
                    return failure
                code_super_block(rows, column, group, fitted, 0, block)
                pack_block(to_half_bits(group.d), block.codes, block.integers, block.seconds, words)
                store_in_rows(words, block_bytes, k * block_bytes, first, out, n_rows)
        return -1

    return quantize_blocks


def _super_block_coder(search: Search, coding: Coding) -> Any:
    """Return the function of kernels that codes one super-block of LANES rows.

        code_super_block(rows, column, group, fitted, sub, block)

    It fills `block`.

    column         where the super-block begins
    group, fitted  what `fit_group` returned and filled for the group that it is in
    sub            number of the super-block's first sub-block in that group
    """
    codes_of, size = coding.codes_of, search.size

    @inlinable
    def code_super_block(
        rows: LaneRows, column: int, group: Group, fitted: Fitted, sub: int, block: SuperBlock
    ) -> None:
        x, importances = float_tile(32), rows.importances
        d = group.d * group.power
        for j in range(SUPER_ELEMS // size):
            start = column + size * j
            load_columns(rows.source, importances.size, rows.first, start, size, x)
            for i in range(size):
                x[i] = x[i] * group.power
            at = (sub + j) * LANES
            integer, second = load(fitted.scales, at), load(fitted.sets, at)
            codes_of(x, importances, start, d * integer, second, tail(block.codes, size * j))
            block.integers[j] = to_int(integer)
            block.seconds[j] = to_int(second)

    return code_super_block


@inlinable
def in_order(values: IntTile, first: int, count: int, shift: int, bits: int) -> Ints:
    """Return bits shift .. shift + bits - 1 of values first .. first + count - 1, the first one lowest."""
    word = splat(0)
    for i in range(count):
        word |= (values[first + i] >> shift & (1 << bits) - 1) << bits * i
    return word
