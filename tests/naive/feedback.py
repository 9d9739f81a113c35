"""Twins of rounding with feedback: one row, one weight after the other, each error taken off what follows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

f32 = np.float32
Row = npt.NDArray[np.float32]
PANEL = 256


def nearest(value: f32, levels: Row) -> int:
    """Return the number of the nearest level: of two the even one if levels are successive integers."""
    if (np.diff(levels) == 1).all():
        return int(min(max(np.rint(value), levels[0]), levels[-1]) - levels[0])
    return sum(bool(value >= f32(0.5) * (low + high)) for low, high in pairwise(levels))


def round_sub_block(w: Row, upper: Row, slope: f32, low: f32, levels: Row) -> tuple[f32, list[int], Row]:
    """Return what a sub-block costs under one line, its codes and its errors divided by upper's diagonal."""
    w = w.copy()
    cost, codes, errors = f32(0), [], np.zeros_like(w)
    inverse_slope = f32(0) if slope == 0 else f32(1) / slope
    for i in range(len(w)):
        code = nearest((w[i] + low) * inverse_slope, levels)
        errors[i] = (w[i] - (slope * levels[code] - low)) * (f32(1) / upper[i, i])
        cost += errors[i] * errors[i]
        codes.append(code)
        for k in range(i + 1, len(w)):
            w[k] -= errors[i] * upper[i, k]
    return cost, codes, errors


def round_block(w: Row, upper: Row, slopes: Row, lows: Row, levels: Row) -> tuple[list[int], list[int]]:
    """Return the codes of a block, and which line each sub-block takes.

    slopes, lows  (sub-blocks, candidates)
    """
    w = w.copy()
    size = len(w) // len(slopes)
    all_codes, choices = [], []
    for j, lines in enumerate(zip(slopes, lows, strict=True)):
        own, later = slice(j * size, (j + 1) * size), slice((j + 1) * size, None)
        trials = [
            round_sub_block(w[own], upper[own, own], slope, low, levels)
            for slope, low in zip(*lines, strict=True)
        ]
        choice = min(range(len(trials)), key=lambda number: trials[number][0])
        _cost, codes, errors = trials[choice]
        for i, error in enumerate(errors):
            w[later] -= error * upper[j * size + i, later]
        all_codes += codes
        choices.append(choice)
    return all_codes, choices


@dataclass(frozen=True)
class Refined:
    """What becomes of the sub-blocks of a row: a choice of -1 leaves one as it is."""

    choices: list[int]
    codes: list[int]
    moves: Row
    pulls: Row


def refine_row(
    values: Row, pulls: Row, hessian: Row, uppers: Row, slopes: Row, lows: Row, levels: Row
) -> Refined:
    """Choose the sub-blocks of a row anew, one after the other.

    uppers        (columns, size of a sub-block), the factor of each sub-block's moments
    slopes, lows  (sub-blocks, candidates)
    """
    pulls, size = pulls.copy(), uppers.shape[1]
    choices, codes, moves = [], [], np.zeros_like(values)
    for j, lines in enumerate(zip(slopes, lows, strict=True)):
        own = slice(j * size, (j + 1) * size)
        upper = uppers[own]
        roots, cost_now, target = np.zeros(size, f32), f32(0), values[own].copy()
        for i in range(size):
            for k in range(i, size):
                roots[i] += pulls[own][k] * upper[i, k]
            cost_now += roots[i] * roots[i]
        for k in range(size):
            for i in range(k + 1):
                target[k] += roots[i] * upper[i, k]
        candidates = list(zip(*lines, strict=True))
        trials = [round_sub_block(target, upper, slope, low, levels) for slope, low in candidates]
        choice = min(range(len(trials)), key=lambda number: trials[number][0])
        cost, best_codes, _errors = trials[choice]
        codes += best_codes
        if cost < cost_now * f32(1 - 1e-5):
            slope, low = candidates[choice]
            moves[own] = slope * levels[best_codes] - low - values[own]
            choices.append(choice)
        else:
            choices.append(-1)
        for i in range(own.start, own.stop):
            pulls -= moves[i] * hessian[i]
    return Refined(choices, codes, moves, pulls)


def round_row(row: Row, upper: Row, round_block: Callable[[Row, int], Row]) -> Row:
    """Return the values of a row, given what rounds the columns from some column on to their values."""
    w = row.copy()
    values = np.zeros_like(w)
    n = len(w)
    for start in range(0, n, PANEL):
        stop = min(start + PANEL, n)
        values[start:stop] = round_block(w[start:stop], start)
        rest = w[start:stop] - values[start:stop]
        total = np.zeros(n - stop, f32)
        for i in range(stop - start):
            error = rest[i] * (f32(1) / upper[start + i, start + i])
            rest[i + 1 :] -= error * upper[start + i, start + i + 1 : stop]
            total += error * upper[start + i, stop:]
        w[stop:] -= total
    return values
