"""Parts that IQ2_XXS, IQ2_XS and IQ2_S share: signs apart, levels from a grid, and the search for a scale.

A super-block is 256 weights in sub-blocks of 16 or 32, a sub-block is groups of 8. A weight is
+-scale * (1, 3 or 5), and the levels of a group are a point of the format's grid. Signs are taken off first;
where a block stores only seven of a group's eight, their count is made even by one sign that is wrong.

The search tries inverse scales around the one that gives the largest magnitude the value 5. Each candidate
rounds every element to a level, moves groups off the grid to a neighbour, and gets a weighted least squares
fit; the fit's error decides. Afterwards groups that had to be moved are coded again with the winning scale.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from quantize.formats.iq.grid_blocks import ELEMS, SubBlock
from quantize.formats.iq.grids import NOWHERE, Grid, GridTables
from quantize.formats.iq.grids.cached_search_4 import Answers, prepare_once
from quantize.formats.iq.grids.cached_search_8 import answer, prepare
from quantize.simd.floats import HALF, ONE, ZERO, halves_to_float32
from quantize.simd.kernel import inlinable, kernel
from quantize.simd.lane_items import look_up
from quantize.simd.lane_memory import FloatTile, IntTile, gather, int_tile, tail
from quantize.simd.lanes import (
    Floats,
    Ints,
    Mask,
    bits,
    from_bits,
    lane_numbers,
    maximum,
    minimum,
    select,
    splat,
    to_float,
)

GROUP = 8
CODE_BITS = 2

_FIVE = np.float32(5)
_STEP = np.float32(0.1)
_BELOW = np.float32(0.875)

_MAGIC = np.float32(1.5 * 2**24)  # float32 has steps of two there
_FRACTION = 0x007FFFFF
_LEVEL_ZERO = 0x00400000  # the fraction bits that stand for 0
_NUMBER_ZERO = _LEVEL_ZERO * (3**GROUP // 2) & 0x7FFFFFFF  # the lattice number of eight of these, in 32 bits


class IQ2Search(NamedTuple):
    """A sub-block and what its search keeps: Tiles."""

    sub: SubBlock
    answers: Answers
    codes: IntTile  # one vector per group: codes of the best candidate
    moved: IntTile  # 1 where the group's code is that of a neighbour, else 0


@inlinable
def level_values() -> Floats:
    """Return the table of what levels stand for, in scales: 1, 3, 5, and 7, which is not used."""
    return to_float((lane_numbers() & 3) * 2 + 1)


# ---- levels and scales


@inlinable
def _number(x: FloatTile, inverse: Floats) -> Ints:
    """Return the lattice number of the levels nearest to a group of 8: (x * inverse - 1) / 2, in 0 .. 2.

    nearest_int of half of a value has the fraction bits that twice the magic number gives to the value.
    """
    number = splat(0)
    for step in range(GROUP):
        i = GROUP - 1 - step
        level = bits(inverse * x[i] - ONE + _MAGIC) & _FRACTION
        number = number * 3 + maximum(minimum(level, _LEVEL_ZERO + 2), _LEVEL_ZERO)
    return number - _NUMBER_ZERO


@inlinable
def _fit(values: Floats, sub: SubBlock, size: int, codes: IntTile) -> tuple[Floats, Floats]:
    """Return the weighted sums of value * x and of value**2 for one code per group."""
    sum_qx = splat(ZERO)
    sum_q2 = splat(ZERO)
    for k in range(size // GROUP):
        rest = codes[k]
        for i in range(GROUP * k, GROUP * (k + 1)):
            value = look_up(values, rest)
            rest >>= CODE_BITS
            sum_qx += sub.weighted[i] * value
            sum_q2 += sub.weights[i] * value * value
    return sum_qx, sum_q2


@inlinable
def search_candidates(
    tables: GridTables, search: IQ2Search, size: int, reach: int, top: Floats, active: Mask, scale: Floats
) -> tuple[Floats, Mask]:
    """Return the best scale and where the search failed; fill `codes` and `moved` of the search.

    The inverse scales are (5 + step / 10) / top, step = -reach .. reach. Without a candidate better than
    nothing, `scale` and `codes` stay as they come and no group counts as moved.

    top     the magnitude that is to get the value 5
    active  where there is something to search
    """
    sub, answers, codes, moved = search
    values = level_values()
    n_groups = size // GROUP
    spread = np.float32(reach) * _STEP
    lowest = top / (_FIVE + spread)
    prepare(sub.x, sub.roots, lowest, top / (_FIVE - spread), n_groups, answers)
    best = splat(ZERO)
    failed = ~(active | ~active)
    for k in range(n_groups):
        moved[k] = splat(0)
        answers.wanted[k] = select(active, splat(1), 0)
    for step in range(-reach, reach + 1):
        inverse = (_FIVE + np.float32(step) * _STEP) / top
        for k in range(n_groups):
            answers.numbers[k] = _number(tail(sub.x, GROUP * k), inverse)
        answer(tables, sub.x, sub.roots, ONE / inverse, inverse, _BELOW * lowest, n_groups, answers)
        sum_qx, sum_q2 = _fit(values, sub, size, answers.codes)
        better = active & (sum_q2 > ZERO) & (sum_qx * sum_qx > best * sum_q2)
        scale = select(better, sum_qx / sum_q2, scale)
        best = select(better, scale * sum_qx, best)
        for k in range(n_groups):
            failed |= active & (answers.codes[k] == NOWHERE)
            codes[k] = select(better, answers.codes[k], codes[k])
            searched = select(answers.limits[k] > ZERO, splat(1), 0)
            moved[k] = select(better, searched, moved[k])
    return scale, failed


@inlinable
def search_again(tables: GridTables, search: IQ2Search, size: int, scale: Floats) -> tuple[Floats, Mask]:
    """Return a scale fitted again and where the search failed, after new codes for this scale.

    Groups get a new code where `moved` is not 0 and the scale is positive.
    """
    sub, answers, codes, again = search
    n_groups = size // GROUP
    inverse = ONE / scale
    prepare_once(n_groups, answers)
    any_again = again[0]
    for k in range(1, n_groups):
        any_again |= again[k]
    changed = (any_again != 0) & (scale > ZERO)
    failed = ~(changed | ~changed)
    for k in range(n_groups):
        answers.numbers[k] = _number(tail(sub.x, GROUP * k), inverse)
        answers.wanted[k] = select(changed, again[k], 0)
    answer(tables, sub.x, sub.roots, scale, inverse, scale, n_groups, answers)
    for k in range(n_groups):
        codes[k] = select(answers.wanted[k] != 0, answers.codes[k], codes[k])
        failed |= codes[k] == NOWHERE
    sum_qx, sum_q2 = _fit(level_values(), sub, size, codes)
    return select(changed & (sum_q2 > ZERO), sum_qx / sum_q2, scale), failed


@inlinable
def finish(
    tables: GridTables,
    size: int,
    scale: Floats,
    active: Mask,
    failed: Mask,
    codes: IntTile,
    signs: IntTile,
    all_signs: int,
) -> tuple[Floats, Mask]:
    """Return the scale as a positive number and where the sub-block failed; turn codes into indices.

    A scale below 0, as wrong signs may give, turns all signs instead. An inactive sub-block is all zero.
    """
    for k in range(size // GROUP):
        signs[k] = select(active, select(scale < ZERO, signs[k] ^ all_signs, signs[k]) & all_signs, 0)
        codes[k] = select(active, gather(tables.indices, codes[k] & 0xFFFF), 0)
    scale = select(scale < ZERO, -scale, scale)
    return select(active, scale, ZERO), active & (failed | ~(scale >= ZERO))


@inlinable
def search_16(
    tables: GridTables,
    sub: SubBlock,
    answers: Answers,
    empty: np.float32,
    all_signs: int,
    codes: IntTile,
    signs: IntTile,
) -> tuple[Floats, Mask]:
    """Return the scale of a sub-block of 16 and where there is none; fill its indices, and amend its signs.

    empty      magnitudes below it count as zero
    all_signs  the bits of signs that are stored
    """
    moved = int_tile(2)
    largest = sub.x[0]
    for i in range(1, 16):
        largest = maximum(largest, sub.x[i])
    active = ~(largest < empty)
    for k in range(2):
        codes[k] = splat(0)
    search = IQ2Search(sub, answers, codes, moved)
    scale, failed = search_candidates(tables, search, 16, 9, largest, active, largest / _FIVE)
    scale, failed_again = search_again(tables, search, 16, scale)
    return finish(tables, 16, scale, active, failed | failed_again, codes, signs, all_signs)


# ---- blocks


@inlinable
def pack_nibbles(codes: IntTile, halves: IntTile) -> None:
    """Fill 4 halves with 16 codes of 4 bits."""
    for k in range(4):
        halves[k] = codes[4 * k] | codes[4 * k + 1] << 4 | codes[4 * k + 2] << 8 | codes[4 * k + 3] << 12


def decode_points(
    grid: Grid,
    d: npt.NDArray[np.uint16],
    scales: npt.NDArray[np.uint8],
    indices: npt.NDArray[np.integer],
    signs: npt.NDArray[np.uint8],
) -> npt.NDArray[np.float32]:
    """Return the weights of blocks, float32 (n_blocks, 256).

    d        float16 bits (n_blocks,)
    scales   0 .. 15, one per sub-block (n_blocks, 8 or 16)
    indices  of grid points (n_blocks, 32)
    signs    uint8 (n_blocks, 32): bit i set where element i of the group is negative
    """
    with np.errstate(all="ignore"):  # an infinite or NaN scale decodes to what IEEE arithmetic makes of it
        factors = halves_to_float32(d)[:, None] * (HALF + scales) * np.float32(0.25)
    weights = np.empty((len(d), ELEMS), np.float32)
    values = grid.points.astype(np.float32).reshape(-1)
    flat_indices = indices.astype(np.int64).reshape(-1)
    _decode(values, factors.reshape(-1), flat_indices, signs.reshape(-1), weights.reshape(-1))
    return weights


@kernel
def _decode(
    values: npt.NDArray[np.float32],
    factors: npt.NDArray[np.float32],
    indices: npt.NDArray[np.int64],
    signs: npt.NDArray[np.uint8],
    out: npt.NDArray[np.float32],
) -> None:
    """Fill `out` with the points of all groups; a sign turns that of a NaN too, as ggml's decoder does."""
    per_factor = indices.size // factors.size
    for j in range(factors.size):
        for k in range(j * per_factor, (j + 1) * per_factor):
            for i in range(GROUP):
                value = factors[j] * values[GROUP * indices[k] + i]
                out[GROUP * k + i] = from_bits(bits(value) ^ (signs[k] >> i & 1) << 31)


def with_even_signs(signs: npt.NDArray[np.integer]) -> npt.NDArray[np.uint8]:
    """Return 7 stored signs with the eighth, which makes their count even: uint8."""
    seven = signs.astype(np.uint8) & np.uint8(0x7F)
    return seven | (np.bitwise_count(seven) & np.uint8(1)) << np.uint8(7)
