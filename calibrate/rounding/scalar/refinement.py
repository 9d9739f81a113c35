"""The kernels that choose sub-blocks anew, one after the other, with all other columns as they are.

The pull of a row's errors e on its columns is p = e H. With the other columns fixed, the best values of a
sub-block would be v + p H_jj^-1, H_jj its own moments, and what other values cost is measured from there. So
choosing them is rounding with feedback once more, by the factor of H_jj. The choice is taken where it costs
less than v does, and the pull follows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from calibrate.rounding.base import PANEL
from calibrate.rounding.scalar.sub_blocks import (
    ONE,
    ZERO,
    choose_evenly,
    choose_unevenly,
    code_of_any,
    code_of_even,
)
from quantize.formats.base import Floats32
from quantize.simd.kernel import inlinable, kernel
from quantize.simd.lane_memory import float_tile, int_tile, store
from quantize.simd.lanes import LANES, select, splat
from quantize.simd.packing import pack
from quantize.simd.tiles import load_blocks, store_blocks, store_columns

_WORDS = PANEL // 4
_LEAST_GAIN = np.float32(1 - 1e-5)
"""The share of its cost below which a choice counts as better, so that rounding alone changes nothing."""


def _refining(choose: Callable[..., Any], code_of: Callable[..., Any]) -> Any:
    """Return the body of a kernel, given how a sub-block chooses and how a level becomes a code."""

    @inlinable
    def refine_blocks(
        values: Floats32,
        hessian: Floats32,
        uppers: Floats32,
        n: int,
        sub_elems: int,
        levels: Floats32,
        slopes: Floats32,
        lows: Floats32,
        n_candidates: int,
        pulls: Floats32,
        moves: Floats32,
        codes: npt.NDArray[np.uint8],
        choices: npt.NDArray[np.int32],
    ) -> None:
        pull, value, moved = float_tile(PANEL), float_tile(PANEL), float_tile(PANEL)
        target, roots = float_tile(PANEL), float_tile(PANEL)
        errors, chosen = float_tile(PANEL), float_tile(PANEL)
        out, words = int_tile(PANEL), int_tile(_WORDS)
        inverses = np.empty(n, np.float32)
        for i in range(n):
            inverses[i] = ONE / uppers[i * sub_elems + i % sub_elems]
        n_rows = values.size // n
        padded = -(-n_rows // LANES) * LANES
        for first in range(0, n_rows, LANES):
            load_blocks(pulls, first, n, pull)
            load_blocks(values, first, n, value)
            for j in range(n // sub_elems):
                start = j * sub_elems
                own = uppers[start * sub_elems : (start + sub_elems) * sub_elems]
                cost = splat(ZERO)
                for i in range(sub_elems):
                    root = splat(ZERO)
                    for k in range(i, sub_elems):
                        root += pull[start + k] * own[i * sub_elems + k]
                    roots[i] = root
                    cost += root * root
                for k in range(sub_elems):
                    best = value[start + k]
                    for i in range(k + 1):
                        best += roots[i] * own[i * sub_elems + k]
                    target[k] = best
                choice = choose(
                    target,
                    own,
                    inverses[start:],
                    sub_elems,
                    0,
                    sub_elems,
                    levels,
                    slopes,
                    lows,
                    j * n_candidates * padded + first,
                    padded,
                    n_candidates,
                    errors,
                    chosen,
                )
                better = choice.cost < cost * _LEAST_GAIN
                store(choices, j * padded + first, select(better, choice.number, -1))
                for i in range(sub_elems):
                    new = choice.slope * chosen[i] - choice.low
                    out[start + i] = code_of(chosen[i], levels)
                    moved[start + i] = select(better, new - value[start + i], ZERO)
                for k in range(n):
                    rest = pull[k]
                    for i in range(start, start + sub_elems):
                        rest -= moved[i] * hessian[i * n + k]
                    pull[k] = rest
            pack(out, 0, 8, n, n, words)
            store_blocks(words, codes, first, n)
            store_columns(moved, n, first, 0, n, moves)
            store_columns(pull, n, first, 0, n, pulls)

    return refine_blocks


_refine_evenly = _refining(choose_evenly, code_of_even)
_refine_unevenly = _refining(choose_unevenly, code_of_any)


@kernel
def refine_evenly(
    values: Floats32,
    hessian: Floats32,
    uppers: Floats32,
    n: int,
    sub_elems: int,
    levels: Floats32,
    slopes: Floats32,
    lows: Floats32,
    n_candidates: int,
    pulls: Floats32,
    moves: Floats32,
    codes: npt.NDArray[np.uint8],
    choices: npt.NDArray[np.int32],
) -> None:
    """Choose the sub-blocks of a block of columns anew; levels are successive integers.

    values   (n_rows * n,), n <= PANEL a multiple of LANES
    hessian  (n * n,), the moments of these columns
    uppers   (n * sub_elems,), the factor of each sub-block's own moments
    pulls    (n_rows * n,), errors of whole rows times the moments; changed as the errors change
    moves    (n_rows * n,), gets the change of the values
    codes    (n_rows * n,), gets codes that count where the choice is not -1
    choices  (sub-blocks * padded,), gets the number of the candidate, -1 where a sub-block stays as it is

    The rest is as in rounding.round_evenly.
    """
    _refine_evenly(
        values,
        hessian,
        uppers,
        n,
        sub_elems,
        levels,
        slopes,
        lows,
        n_candidates,
        pulls,
        moves,
        codes,
        choices,
    )


@kernel
def refine_unevenly(
    values: Floats32,
    hessian: Floats32,
    uppers: Floats32,
    n: int,
    sub_elems: int,
    levels: Floats32,
    slopes: Floats32,
    lows: Floats32,
    n_candidates: int,
    pulls: Floats32,
    moves: Floats32,
    codes: npt.NDArray[np.uint8],
    choices: npt.NDArray[np.int32],
) -> None:
    """Choose sub-blocks anew as `refine_evenly` does, for any levels."""
    _refine_unevenly(
        values,
        hessian,
        uppers,
        n,
        sub_elems,
        levels,
        slopes,
        lows,
        n_candidates,
        pulls,
        moves,
        codes,
        choices,
    )
