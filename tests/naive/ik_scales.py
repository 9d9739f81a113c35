"""Twins of the searches for ik_llama.cpp's types: a group at a time, each sum in its order, each level tried.

Arrays are over candidates; whatever is summed is summed one weight at a time, in float32.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from quantize.formats.ik.cells import Cells
from quantize.formats.ik.scale_search import Search

Floats = npt.NDArray[np.float32]
f32 = np.float32


def power_of(largest: f32) -> f32:
    """Return the power of two that brings a number to 1 .. 2, as far as float32 has it."""
    exponent = min(int(f32(largest).view(np.uint32)) >> 23 & 0xFF, 253)
    return f32(2.0 ** (127 - exponent))


class LevelSearch:
    """The search for a type whose weights each take a level of one of two sets."""

    def __init__(self, search: Search, cells: Cells, levels: Floats, shift: float) -> None:
        self.search, self.cells, self.shift = search, cells, shift
        self.numbers = ((levels.astype(np.float64) - cells.start) * cells.density).astype(f32)
        low, high, step = search.integers
        self.allowed = np.arange(low, high + 1, step).astype(f32)

    def _places(self, scale: Floats, second: int) -> tuple[Floats, Floats]:
        """Return what turns x into its number in cells: a factor and an offset."""
        density = f32(self.cells.density)
        origin = f32(-self.cells.start * self.cells.density)
        return density / scale, origin - f32(second) * f32(self.shift * self.cells.density)

    def _numbers(self, x: f32, scale: Floats, second: int) -> tuple[Floats, npt.NDArray[np.intp]]:
        factor, offset = self._places(scale, second)
        number = x * factor + offset
        distances = np.abs(number[..., None] - self.numbers)
        nearest = np.where(np.isnan(number), 0, distances.argmin(axis=-1))
        return number, nearest

    def errors(self, x: Floats, costs: Floats, scale: Floats, second: int) -> Floats:
        total = np.zeros_like(scale)
        for value, cost in zip(x, costs, strict=True):
            number, nearest = self._numbers(value, scale, second)
            total += cost * (number - self.numbers[nearest]) ** 2
        cell = scale * f32(1 / self.cells.density)
        return total * (cell * cell)

    def sums(self, x: Floats, costs: Floats, scale: f32, second: int) -> tuple[f32, f32]:
        sum_lx = sum_l2 = f32(0)
        for value, cost in zip(x, costs, strict=True):
            _, nearest = self._numbers(value, np.array([scale]), second)
            offset = self._places(np.array([scale]), second)[1]
            level = (self.numbers[nearest[0]] - offset) * f32(1 / self.cells.density)
            sum_lx += cost * level * value
            sum_l2 += cost * level * level
        return sum_lx, sum_l2

    def legal(self, values: Iterable[f32]) -> list[f32]:
        """Return the nearest allowed integers; of two, the one of an even number of steps from 0 or 1."""
        step = self.search.integers.step
        odd = f32(self.search.integers.low % step)
        rounded = [np.rint((value - odd) * f32(1 / step)) * f32(step) + odd for value in values]
        return [min(max(value, self.allowed[0]), self.allowed[-1]) for value in rounded]

    def best(self, x: Floats, costs: Floats, d: f32, integers: list[f32]) -> tuple[f32, f32, int]:
        """Return the least error, and the integer and set that have it; the first of equals."""
        chosen: tuple[f32, f32, int]
        if self.search.integers.step == 1:
            total = f32(0)
            for value, cost in zip(x, costs, strict=True):
                total += cost * (value * value)
            chosen = (total, f32(0), 0)
        else:
            chosen = (f32(np.inf), f32(1), 0)
        errors = [
            self.errors(x, costs, d * np.array(integers, f32), second) for second in range(self.search.sets)
        ]
        for k, integer in enumerate(integers):
            for second in range(self.search.sets):
                if errors[second][k] < chosen[0]:
                    chosen = (errors[second][k], integer, second)
        return chosen

    def _quotient(self, groups: list[tuple[Floats, Floats, f32, int]], d: f32) -> f32 | None:
        sum_lx = sum_l2 = f32(0)
        for x, costs, integer, second in groups:
            lx, l2 = self.sums(x, costs, d * integer, second)
            if integer != 0 and d != 0:
                sum_lx += integer * lx
                sum_l2 += integer * integer * l2
        return sum_lx / sum_l2 if sum_l2 > 0 else None

    def _stored(self, d: f32, power: f32) -> f32:
        unscaled = f32(np.float64(d) / np.float64(power))
        return f32(np.float16(unscaled)) if self.search.has_half else unscaled

    def values(self, x: Floats, costs: Floats) -> Floats:
        """Return what a group is decoded to, float32 of its size."""
        search = self.search
        power = power_of(np.abs(x).max())
        scaled = (x * power).reshape(-1, search.size)
        costs = costs.reshape(-1, search.size)
        largest = np.abs(scaled).max()
        most = f32(search.reach * max(-search.integers.low, search.integers.high))
        least, best_d = f32(np.inf), f32(0)
        integers = [f32(0)] * len(scaled)
        for trial in range(len(search.spreads) * search.signs):
            d = largest * (search.spreads[trial // search.signs] / most)
            d = -d if trial % search.signs else d
            total, groups = f32(0), []
            for sub, cost in zip(scaled, costs, strict=True):
                base = np.abs(sub).max() / (f32(search.reach) * d)
                tried = self.legal(base * s * factor for factor in search.factors for s in (f32(1), f32(-1)))
                error, integer, second = self.best(sub, cost, d, tried)
                total += error
                groups.append((sub, cost, integer, second))
            quotient = self._quotient(groups, d)
            if total < least and quotient is not None:
                least, best_d, integers = total, quotient, [group[2] for group in groups]
        for _ in range(2):
            d = self._stored(best_d, power) * power
            groups = []
            for sub, cost, old in zip(scaled, costs, integers, strict=True):
                step = f32(search.integers.step)
                tried = self.legal(old + f32(k) * step for k in (-1, 0, 1))
                groups.append((sub, cost, *self.best(sub, cost, d, tried)[1:]))
            integers = [group[2] for group in groups]
            best_d = self._quotient(groups, d) or f32(0)
        d = self._stored(best_d, power)
        decoded = []
        for sub, _cost, integer, second in groups:
            for value in sub:
                _, nearest = self._numbers(value, np.array([d * power * integer], f32), second)
                level = self.numbers[nearest[0]] / f32(self.cells.density)
                exact = f32(np.rint(level + self.cells.start) + self.shift * second)
                decoded.append(d * integer * exact)
        return np.array(decoded, f32)
