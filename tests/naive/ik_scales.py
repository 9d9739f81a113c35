"""Twins of the searches for ik_llama.cpp's types: a group at a time, each sum in its order, each level tried.

Arrays are over candidates; whatever is summed is summed one weight at a time, in float32.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from quantize.formats.ik.levels.levels import Cells
from quantize.formats.ik.levels.scale_search import ScaleTrials

Floats = npt.NDArray[np.float32]
f32 = np.float32


def power_of(largest: f32) -> f32:
    """Return the power of two that brings a number to 1 .. 2, as far as float32 has it."""
    exponent = min(int(f32(largest).view(np.uint32)) >> 23 & 0xFF, 253)
    return f32(2.0 ** (127 - exponent))


class ScaleSearch:
    """The search; what is made of a sub-block of given scale and set is that of a subclass."""

    def __init__(self, search: ScaleTrials) -> None:
        self.search = search
        low, high, step = search.integers
        self.allowed = np.arange(low, high + 1, step).astype(f32)

    def errors(self, x: Floats, costs: Floats, scale: Floats, second: int) -> Floats:
        """Return the errors of a sub-block with each of some scales."""
        raise NotImplementedError

    def levels(self, x: Floats, costs: Floats, scale: f32, second: int) -> tuple[Floats, Floats]:
        """Return the levels of a sub-block, as the search computes them and as they are."""
        raise NotImplementedError

    def sums(self, x: Floats, costs: Floats, scale: f32, second: int) -> tuple[f32, f32]:
        sum_lx = sum_l2 = f32(0)
        for value, cost, level in zip(x, costs, self.levels(x, costs, scale, second)[0], strict=True):
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
        decoded = [
            d * integer * self.levels(sub, cost, d * power * integer, second)[1]
            for sub, cost, integer, second in groups
        ]
        return np.concatenate(decoded).astype(f32)


class LevelSearch(ScaleSearch):
    """Each weight takes the nearest level of one of two sets, `table` being both."""

    def __init__(self, search: ScaleTrials, cells: Cells, table: Floats, shift: float) -> None:
        super().__init__(search)
        self.table, self.step = table, f32(shift * cells.density)
        self.density, self.unit = f32(cells.density), f32(1 / cells.density)
        self.origin = f32(-cells.start * cells.density)
        first = table[: len(table) // 2].astype(np.float64)
        self.numbers = ((first - cells.start) * cells.density).astype(f32)

    def place(self, x: f32, scale: Floats, second: int) -> Floats:
        """Return where x is with each scale, in cells."""
        return x * (self.density / scale) + (self.origin - f32(second) * self.step)

    def errors(self, x: Floats, costs: Floats, scale: Floats, second: int) -> Floats:
        total = np.zeros_like(scale)
        for value, cost in zip(x, costs, strict=True):
            squares = (self.place(value, scale, second)[:, None] - self.numbers) ** 2
            total += cost * squares.min(axis=1)
        cell = scale * self.unit
        return total * (cell * cell)

    def codes(self, x: Floats, costs: Floats, scale: f32, second: int) -> list[int]:
        places = [self.place(value, np.array([scale]), second)[0] for value in x]
        return [0 if np.isnan(place) else int(np.abs(place - self.numbers).argmin()) for place in places]

    def levels(self, x: Floats, costs: Floats, scale: f32, second: int) -> tuple[Floats, Floats]:
        codes = np.array(self.codes(x, costs, scale, second))
        start = self.origin - f32(second) * self.step
        exact = self.table[len(self.numbers) * second + codes]
        return (self.numbers[codes] - start) * self.unit, exact


class EvenSearch(LevelSearch):
    """The same with codes in fours, whose ones are even in number."""

    fours = tuple((2 * k, 2 * k + 16, 2 * k + 1, 2 * k + 17) for k in range(8))
    parities = np.array([code.bit_count() % 2 for code in range(16)])

    def _squares(self, x: f32, cost: f32, scale: Floats, second: int, parity: int) -> Floats:
        distances = self.place(x, scale, second)[:, None] - self.numbers[self.parities == parity]
        squares: Floats = cost * (distances**2).min(axis=1)
        return squares

    def errors(self, x: Floats, costs: Floats, scale: Floats, second: int) -> Floats:
        total = np.zeros_like(scale)
        for four in self.fours:
            is_odd, least = np.zeros(scale.shape, bool), np.full(scale.shape, f32(np.inf))
            for i in four:
                even, odd = (self._squares(x[i], costs[i], scale, second, parity) for parity in (0, 1))
                total += np.minimum(even, odd)
                least = np.minimum(least, np.abs(even - odd))
                is_odd ^= odd < even
            total += np.where(is_odd, least, f32(0))
        cell = scale * self.unit
        return total * (cell * cell)

    def codes(self, x: Floats, costs: Floats, scale: f32, second: int) -> list[int]:
        codes = [0] * 32
        scales = np.array([scale])
        for four in self.fours:
            both = [
                [self._squares(x[i], costs[i], scales, second, parity)[0] for parity in (0, 1)] for i in four
            ]
            parities = [int(odd < even) for even, odd in both]
            if sum(parities) % 2:
                parities[int(np.argmin([abs(even - odd) for even, odd in both]))] ^= 1
            for i, parity in zip(four, parities, strict=True):
                distances = np.abs(self.place(x[i], scales, second)[0] - self.numbers)
                distances[self.parities != parity] = np.inf
                codes[i] = int(distances.argmin())
        return codes


class PairSearch(ScaleSearch):
    """Weights are coded in pairs; `pairs` are those of levels, (32, 2)."""

    def __init__(self, search: ScaleTrials, pairs: Floats) -> None:
        super().__init__(search)
        self.pairs = pairs

    def _squares(self, x: Floats, costs: Floats, scale: Floats) -> Floats:
        """Return the error of each pair of weights with each scale and pair of levels."""
        places = x.reshape(-1, 1, 2) * (f32(1) / scale)[:, None]
        distances = places[:, :, None] - self.pairs
        squares = costs.reshape(-1, 1, 1, 2) * (distances * distances)
        total: Floats = squares[..., 0] + squares[..., 1]
        return total

    def errors(self, x: Floats, costs: Floats, scale: Floats, second: int) -> Floats:
        total = np.zeros_like(scale)
        for squares in self._squares(x, costs, scale):
            total += squares.min(axis=1)
        return total * (scale * scale)

    def levels(self, x: Floats, costs: Floats, scale: f32, second: int) -> tuple[Floats, Floats]:
        codes = self._squares(x, costs, np.array([scale]))[:, 0].argmin(axis=1)
        levels = self.pairs[codes].reshape(-1)
        return levels, levels
