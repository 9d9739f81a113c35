"""Twins of the choice of grid points under feedback: one row, point by point, element by element.

What is left of an element is in units of U[i, i], and an error takes error * ratios[i, j] off a later one,
ratios[i, j] = U[i, j] / U[j, j], as in quantize.rounding.grids.tree_search.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

f32 = np.float32
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Way:
    """What has been chosen for some elements: its cost, the signed levels, and what is left of all."""

    cost: f32
    levels: tuple[float, ...]
    rests: Floats

    def go(self, level: f32, unit: f32, ratios: Floats) -> Way:
        i = len(self.levels)
        error = self.rests[i] - level * unit
        rests = self.rests.copy()
        rests[i + 1 :] -= error * ratios[i, i + 1 :]
        return Way(self.cost + error * error, (*self.levels, level), rests)


def cheapest(ways: Iterable[Way]) -> Way:
    return min(ways, key=lambda way: way.cost)


@dataclass(frozen=True)
class Problem:
    """Elements to round: levels of the grid's points (n, 8 or 4), the scale in units of U[i, i], ratios."""

    points: Floats
    units: Floats
    ratios: Floats

    def along(self, way: Way, point: Floats, sign: f32 | None) -> Way:
        """Go on to a point with one sign for all elements, or None: with the nearer one of each."""
        for level in point:
            i = len(way.levels)
            signed = level * (np.copysign(f32(1), way.rests[i]) if sign is None else sign)
            way = way.go(signed, self.units[i], self.ratios)
        return way

    def even_and_odd(self, even: Way | None, odd: Way | None, point: Floats) -> list[Way | None]:
        """Go on to a point, with a way for either count of minus signs so far."""
        ways = [even, odd]
        for level in point:
            next_ways: list[Way | None] = []
            for plus, minus in (ways, ways[::-1]):
                to = [
                    way.go(signed, self.units[len(way.levels)], self.ratios)
                    for way, signed in ((plus, level), (minus, -level))
                    if way is not None
                ]
                next_ways.append(cheapest(to))
            ways = next_ways
        return ways


RoundOctet = Callable[[Problem, Way], Way]


def free_octet(problem: Problem, way: Way) -> Way:
    for _group in range(8 // problem.points.shape[1]):
        way = cheapest(problem.along(way, point, None) for point in problem.points)
    return way


def even_octet(problem: Problem, way: Way) -> Way:
    if problem.points.shape[1] == 8:
        return cheapest(problem.even_and_odd(way, None, point)[0] for point in problem.points)  # type: ignore[type-var]
    begun = [problem.even_and_odd(way, None, point) for point in problem.points]
    even, odd = (cheapest(ways[count] for ways in begun) for count in (0, 1))  # type: ignore[misc]
    return cheapest(problem.even_and_odd(even, odd, point)[0] for point in problem.points)  # type: ignore[type-var]


def shifted_octet(problem: Problem, way: Way, shift: float) -> Way:
    return cheapest(problem.along(way, point + f32(shift), f32(1)) for point in problem.points)


def either_shift_octet(problem: Problem, way: Way) -> Way:
    return cheapest(shifted_octet(problem, way, shift) for shift in (0.125, -0.125))


def round_sub_block(
    round_octets: Sequence[RoundOctet], points: Floats, w: Floats, upper: Floats, scale: f32
) -> tuple[f32, Floats]:
    """Return what weights (16 or 32,) cost at a scale, and the signed levels chosen for them."""
    diagonal = np.diag(upper)
    ratios, inverses = upper / diagonal, f32(1) / diagonal
    rests, units = w * inverses, scale * inverses
    cost, levels = f32(0), []
    for number, round_octet in enumerate(round_octets):
        first = 8 * number
        own = slice(first, first + 8)
        way = round_octet(Problem(points, units[own], ratios[own, own]), Way(f32(0), (), rests[own]))
        errors = way.rests - units[own] * np.array(way.levels, f32)
        for i in range(8):
            rests[first + 8 :] -= errors[i] * ratios[first + i, first + 8 :]
        cost += way.cost
        levels += way.levels
    return cost, np.array(levels, f32)


def round_at_scales(
    name: str, points: Floats, w: Floats, upper: Floats, scales: Sequence[f32]
) -> tuple[f32, f32, Floats]:
    """Return the cost of a sub-block of a type, the scale that is cheapest and the signed levels.

    The shifts of IQ1 are chosen at the first scale: one for each octet of IQ1_M, one for all of IQ1_S.
    """
    n_octets = len(w) // 8
    plus, minus = (partial(shifted_octet, shift=shift) for shift in (0.125, -0.125))
    of_all: dict[str, list[RoundOctet]] = {
        "IQ1_S": [plus, minus],
        "IQ1_M": [either_shift_octet],
        "IQ2_S": [free_octet],
        "IQ3_S": [free_octet],
    }
    octets = of_all.get(name, [even_octet])
    trials = [
        (*round_sub_block([octet] * n_octets, points, w, upper, scales[0]), scales[0]) for octet in octets
    ]
    again = [octets[0]] * n_octets
    if name.startswith("IQ1"):
        levels = min(trials, key=lambda trial: trial[0])[1]
        again = [plus if level > np.rint(level) else minus for level in levels[::8]]
    trials += [(*round_sub_block(again, points, w, upper, scale), scale) for scale in scales[1:]]
    cost, levels, scale = min(trials, key=lambda trial: trial[0])
    return cost, scale, levels
