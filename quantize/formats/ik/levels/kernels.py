"""The kernels of types that take the nearest of some levels: over rows, and over the super-blocks of rows.

A type says how its codes, the integers of its sub-blocks and their sets are packed. The rest is the same for
all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from quantize.formats.base import Floats32, Rows
from quantize.formats.ik.levels.levels import SUPER_ELEMS
from quantize.formats.ik.levels.scale_search import Coding, Group, Search, fitting
from quantize.formats.ik.rows import first_infinite, store_in_rows
from quantize.simd.half import to_half_bits
from quantize.simd.kernel import inlinable
from quantize.simd.lane_memory import IntTile, float_tile, int_tile, load, store, tail
from quantize.simd.lanes import LANES, Ints, splat, to_int
from quantize.simd.tiles import load_columns, padded_words


def row_quantizer(
    search: Search, coding: Coding, block_bytes: int, meta_bytes: int, pack_block: Callable[..., None]
) -> Any:
    """Return the function of kernels that encodes rows, each with a scale of its own.

        quantize_rows(source, importances, scales, out) -> int, as `rows.encode_scaled_rows` has it

    meta_bytes  bytes in front of a row
    pack_block  called as pack_block(codes, integers, seconds, words), to fill `words` with a super-block
    """
    fit_group, code_super_block = fitting(search, coding), _super_block_coder(search, coding)
    n_words, size = padded_words(block_bytes), search.size

    @inlinable
    def quantize_rows(
        source: Rows, importances: Floats32, scales: Floats32, out: npt.NDArray[np.uint8]
    ) -> int:
        n_cols, n_rows = importances.size, scales.size
        codes, integers, seconds = int_tile(SUPER_ELEMS), int_tile(16), int_tile(16)
        words = int_tile(n_words)
        fitted = np.empty(n_cols // size * LANES, np.float32)
        sets = np.empty(n_cols // size * LANES, np.float32)
        of_rows = np.empty(LANES, np.float32)
        for first in range(0, n_rows, LANES):
            group = fit_group(source, n_cols, importances, first, 0, n_cols, fitted, sets)
            failure = first_infinite(group.d, first)
            if failure >= 0:
                return failure
            store(of_rows, 0, group.d)
            for row in range(first, min(first + LANES, n_rows)):
                scales[row] = of_rows[row - first]
            for k in range(n_cols // SUPER_ELEMS):
                column = k * SUPER_ELEMS
                sub = column // size
                code_super_block(
                    source, importances, first, column, group, fitted, sets, sub, codes, integers, seconds
                )
                pack_block(codes, integers, seconds, words)
                store_in_rows(words, block_bytes, meta_bytes + k * block_bytes, first, out, n_rows)
        return -1

    return quantize_rows


def block_quantizer(search: Search, coding: Coding, block_bytes: int, pack_block: Callable[..., None]) -> Any:
    """Return the function of kernels that encodes super-blocks, each with a float16 of its own.

        quantize_blocks(source, importances, out) -> int, as `rows.encode_rows` has it

    pack_block  called as pack_block(half_d, codes, integers, seconds, words)
    """
    fit_group, code_super_block = fitting(search, coding), _super_block_coder(search, coding)
    n_words, n_subs = padded_words(block_bytes), SUPER_ELEMS // search.size

    @inlinable
    def quantize_blocks(source: Rows, importances: Floats32, out: npt.NDArray[np.uint8]) -> int:
        n_cols = importances.size
        n_rows = source.size // n_cols
        codes, integers, seconds = int_tile(SUPER_ELEMS), int_tile(16), int_tile(16)
        words = int_tile(n_words)
        fitted, sets = np.empty(n_subs * LANES, np.float32), np.empty(n_subs * LANES, np.float32)
        for first in range(0, n_rows, LANES):
            for k in range(n_cols // SUPER_ELEMS):
                column = k * SUPER_ELEMS
                group = fit_group(source, n_cols, importances, first, column, SUPER_ELEMS, fitted, sets)
                failure = first_infinite(group.d, first)
                if failure >= 0:
                    return failure
                code_super_block(
                    source, importances, first, column, group, fitted, sets, 0, codes, integers, seconds
                )
                pack_block(to_half_bits(group.d), codes, integers, seconds, words)
                store_in_rows(words, block_bytes, k * block_bytes, first, out, n_rows)
        return -1

    return quantize_blocks


def _super_block_coder(search: Search, coding: Coding) -> Any:
    """Return the function of kernels that codes one super-block of LANES rows.

        code_super_block(source, importances, first, column, group, fitted, sets, sub, codes, integers,
                         seconds)

    It fills Tiles of Ints: `codes` (256) and, for each sub-block, `integers` and `seconds`, its set.

    column  where the super-block begins
    group   what `fit_group` returned for the group that it is in; fitted and sets are what it filled
    sub     number of the super-block's first sub-block in that group
    """
    codes_of, size = coding.codes_of, search.size

    @inlinable
    def code_super_block(
        source: Rows,
        importances: Floats32,
        first: int,
        column: int,
        group: Group,
        fitted: Floats32,
        sets: Floats32,
        sub: int,
        codes: IntTile,
        integers: IntTile,
        seconds: IntTile,
    ) -> None:
        x = float_tile(32)
        d = group.d * group.power
        for j in range(SUPER_ELEMS // size):
            start = column + size * j
            load_columns(source, importances.size, first, start, size, x)
            for i in range(size):
                x[i] = x[i] * group.power
            integer, second = load(fitted, (sub + j) * LANES), load(sets, (sub + j) * LANES)
            codes_of(x, importances, start, d * integer, second, tail(codes, size * j))
            integers[j] = to_int(integer)
            seconds[j] = to_int(second)

    return code_super_block


@inlinable
def in_order(values: IntTile, first: int, count: int, shift: int, bits: int) -> Ints:
    """Return bits shift .. shift + bits - 1 of values first .. first + count - 1, the first one lowest."""
    word = splat(0)
    for i in range(count):
        word |= (values[first + i] >> shift & (1 << bits) - 1) << bits * i
    return word
