"""The kernels that round a block of columns, sub-block after sub-block, errors carried on to later ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from calibrate.rounding.base import PANEL
from calibrate.rounding.scalar.sub_blocks import (
    ONE,
    choose_evenly,
    choose_unevenly,
    code_of_any,
    code_of_even,
)
from quantize.formats.base import Floats32
from quantize.simd.kernel import inlinable, kernel
from quantize.simd.lane_memory import float_tile, int_tile, store, tail
from quantize.simd.lanes import LANES
from quantize.simd.packing import pack
from quantize.simd.tiles import load_blocks, store_blocks

_WORDS = PANEL // 4


def _rounding(choose: Callable[..., Any], code_of: Callable[..., Any]) -> Any:
    """Return the body of a kernel, given how a sub-block chooses and how a level becomes a code."""

    @inlinable
    def round_blocks(
        rows: Floats32,
        upper: Floats32,
        n: int,
        sub_elems: int,
        levels: Floats32,
        slopes: Floats32,
        lows: Floats32,
        n_candidates: int,
        codes: npt.NDArray[np.uint8],
        choices: npt.NDArray[np.int32],
    ) -> None:
        x, errors, chosen = float_tile(PANEL), float_tile(PANEL), float_tile(PANEL)
        out, words = int_tile(PANEL), int_tile(_WORDS)
        inverses = np.empty(n, np.float32)
        for i in range(n):
            inverses[i] = ONE / upper[i * n + i]
        n_rows = rows.size // n
        padded = -(-n_rows // LANES) * LANES
        for first in range(0, n_rows, LANES):
            load_blocks(rows, first, n, x)
            for j in range(n // sub_elems):
                start = j * sub_elems
                choice = choose(
                    tail(x, start),
                    upper,
                    inverses,
                    n,
                    start,
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
                store(choices, j * padded + first, choice.number)
                for i in range(sub_elems):
                    out[start + i] = code_of(chosen[i], levels)
                for k in range(start + sub_elems, n):
                    value = x[k]
                    for i in range(sub_elems):
                        value -= errors[i] * upper[(start + i) * n + k]
                    x[k] = value
            pack(out, 0, 8, n, n, words)
            store_blocks(words, codes, first, n)

    return round_blocks


_round_evenly = _rounding(choose_evenly, code_of_even)
_round_unevenly = _rounding(choose_unevenly, code_of_any)


@kernel
def round_evenly(
    rows: Floats32,
    upper: Floats32,
    n: int,
    sub_elems: int,
    levels: Floats32,
    slopes: Floats32,
    lows: Floats32,
    n_candidates: int,
    codes: npt.NDArray[np.uint8],
    choices: npt.NDArray[np.int32],
) -> None:
    """Fill codes and choices of a block of columns; levels are successive integers.

    rows          (n_rows * n,), n <= PANEL a multiple of LANES
    upper         (n * n,), of the factor
    levels        ascending
    slopes, lows  (sub-blocks * n_candidates * padded,), padded n_rows rounded up to LANES: the candidates,
                  an even number up to MOST_CANDIDATES
    codes         (n_rows * n,), number of the level
    choices       (sub-blocks * padded,), number of the candidate
    """
    _round_evenly(rows, upper, n, sub_elems, levels, slopes, lows, n_candidates, codes, choices)


@kernel
def round_unevenly(
    rows: Floats32,
    upper: Floats32,
    n: int,
    sub_elems: int,
    levels: Floats32,
    slopes: Floats32,
    lows: Floats32,
    n_candidates: int,
    codes: npt.NDArray[np.uint8],
    choices: npt.NDArray[np.int32],
) -> None:
    """Fill codes and choices as `round_evenly` does, for any levels."""
    _round_unevenly(rows, upper, n, sub_elems, levels, slopes, lows, n_candidates, codes, choices)
