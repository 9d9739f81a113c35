"""Choose under a budget: one choice for each item, with the least sum of sensitivities that fits the bytes.

This is a knapsack in which every item must be packed in one of several sizes. It is solved in two steps.

  1. A price per byte. With a price, each item alone decides what is cheapest: sensitivity + price * bytes.
     The right price is found by walking down the items' convex hulls, steepest step first, until the bytes
     are used up. What this costs is a bound: no selection within the budget has a smaller sum.
  2. An exact finish. A choice whose cost at that price exceeds the item's best by more than the gap between
     the best selection so far and the bound can be in no better selection. Few choices are left, and a sweep
     over the items keeps those partial selections that no other beats in both bytes and sensitivity.

Sizes are exact integers. For files with a thousand tensors this takes milliseconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from gguf_tools.errors import BadRequest

_MAX_STATES = 100_000
"""Number of partial selections that the finish keeps at most. Beyond it the worst go, and the result may
stay above the best possible by less than `Selection.gap`."""


class BudgetTooSmall(BadRequest):
    """Even the smallest choices take more; `least` is how many bytes these take."""

    def __init__(self, budget: int, least: int) -> None:
        super().__init__(
            f"a budget of {budget} bytes, and the smallest choices take {least}; allow more bytes"
        )
        self.least = least


@dataclass(frozen=True)
class BudgetChoice:
    """One way to store an item: its bytes, and its sensitivity in any unit that can be added up."""

    name: str
    n_bytes: int
    sensitivity: float


@dataclass(frozen=True)
class Item:
    """Something that needs exactly one of its choices."""

    name: str
    choices: tuple[BudgetChoice, ...]


@dataclass(frozen=True)
class Selection:
    """One choice per item, in the items' order.

    bound  sensitivity that no selection within the budget can be below
    price  sensitivity that one more byte would save, about
    """

    choices: tuple[BudgetChoice, ...]
    bound: float
    price: float

    @property
    def n_bytes(self) -> int:
        return sum(choice.n_bytes for choice in self.choices)

    @property
    def sensitivity(self) -> float:
        return sum(choice.sensitivity for choice in self.choices)

    @property
    def gap(self) -> float:
        """Damage above the bound: the best selection is at most this much better."""
        return max(0.0, self.sensitivity - self.bound)


def select(items: Sequence[Item], budget: int) -> Selection:
    """Return the selection with the least sensitivity whose bytes are at most `budget`.

    raises  BudgetTooSmall when even the smallest choices take more
    """
    fronts = [_undominated(item) for item in items]
    least = sum(front[0].n_bytes for front in fronts)
    if least > budget:
        raise BudgetTooSmall(budget, least)
    start = _walk_hulls(fronts, budget)
    picks = _finish(fronts, start, budget)
    chosen = tuple(front[pick] for front, pick in zip(fronts, picks, strict=True))
    return Selection(chosen, start.bound, start.price)


def _undominated(item: Item) -> list[BudgetChoice]:
    """Return the choices by bytes, without those that another beats in both bytes and sensitivity."""
    kept: list[BudgetChoice] = []
    for choice in sorted(item.choices, key=lambda choice: (choice.n_bytes, choice.sensitivity)):
        if not kept or choice.sensitivity < kept[-1].sensitivity:
            kept.append(choice)
    if not kept:
        raise BadRequest(f"{item.name}: no type is left to choose from")
    return kept


@dataclass(frozen=True)
class _Start:
    """A selection at a price, filled up: pick per item, and what step 1 knows."""

    picks: list[int]
    bound: float
    price: float


def _walk_hulls(fronts: Sequence[Sequence[BudgetChoice]], budget: int) -> _Start:
    """Take the steps of all hulls, those that save most per byte first, as long as they fit.

    The first step that does not fit sets the price and the bound. Later ones may still fit, and are taken.
    """
    picks = [0] * len(fronts)
    n_bytes = sum(front[0].n_bytes for front in fronts)
    sensitivity = sum(front[0].sensitivity for front in fronts)
    steps = [step for item, front in enumerate(fronts) for step in _hull_steps(item, front)]
    steps.sort(key=lambda step: (-step.saves_per_byte, step.item, step.stop))
    bound, price = None, 0.0
    for step in steps:
        # Past a step that did not fit, the rest of that item's hull starts elsewhere and is left alone.
        if picks[step.item] != step.start:
            continue
        if n_bytes + step.n_bytes > budget:
            if bound is None:
                price = step.saves_per_byte
                bound = sensitivity - price * (budget - n_bytes)
            continue
        picks[step.item] = step.stop
        n_bytes += step.n_bytes
        sensitivity -= step.saves
    return _Start(picks, sensitivity if bound is None else bound, price)


@dataclass(frozen=True)
class _Step:
    """From one point of an item's hull to the next: more bytes, less sensitivity."""

    item: int
    start: int
    stop: int
    n_bytes: int
    saves: float

    @property
    def saves_per_byte(self) -> float:
        return self.saves / self.n_bytes


def _hull_steps(item: int, front: Sequence[BudgetChoice]) -> list[_Step]:
    """Return the steps along the lower convex hull of a front, steepest first."""
    hull: list[int] = []
    for pick in range(len(front)):
        while len(hull) > 1 and _slope(front, hull[-2], hull[-1]) <= _slope(front, hull[-1], pick):
            hull.pop()
        hull.append(pick)
    return [
        _Step(item, a, b, front[b].n_bytes - front[a].n_bytes, front[a].sensitivity - front[b].sensitivity)
        for a, b in pairwise(hull)
    ]


def _slope(front: Sequence[BudgetChoice], a: int, b: int) -> float:
    """Return the sensitivity that a byte saves between two points."""
    return (front[a].sensitivity - front[b].sensitivity) / (front[b].n_bytes - front[a].n_bytes)


@dataclass(frozen=True)
class _States:
    """Partial selections: bytes int64, sensitivity float64, and where each came from (state before, pick)."""

    n_bytes: npt.NDArray[np.int64]
    sensitivity: npt.NDArray[np.float64]
    before: npt.NDArray[np.int64]
    pick: npt.NDArray[np.int64]

    def take(self, which: npt.NDArray[np.int64] | npt.NDArray[np.bool_]) -> _States:
        return _States(self.n_bytes[which], self.sensitivity[which], self.before[which], self.pick[which])


def _finish(fronts: Sequence[Sequence[BudgetChoice]], start: _Start, budget: int) -> list[int]:
    """Return the picks of the best selection, which is the start's unless a better one turns up."""
    picks, price = list(start.picks), start.price
    sensitivity = sum(front[pick].sensitivity for front, pick in zip(fronts, picks, strict=True))
    gap = sensitivity - start.bound
    if gap <= 0:
        return picks
    costs = [np.array([choice.sensitivity + price * choice.n_bytes for choice in front]) for front in fronts]
    excess = [cost - cost.min() for cost in costs]
    left = [np.flatnonzero(extra <= gap) for extra in excess]
    # Items with one choice left are settled; those with the cheapest alternatives come first, so that the
    # sweep's bound cuts early.
    open_ = [item for item in range(len(fronts)) if len(left[item]) > 1]
    open_.sort(key=lambda item: -float(np.sort(excess[item][left[item]])[1]))
    settled = [item for item in range(len(fronts)) if len(left[item]) == 1]
    for item in settled:
        picks[item] = int(left[item][0])
    room = budget - sum(fronts[item][picks[item]].n_bytes for item in settled)
    smallest = [min(fronts[item][int(pick)].n_bytes for pick in left[item]) for item in open_]
    none = np.zeros(1, np.int64)
    history = [_States(none, np.zeros(1), none, none)]
    extra = np.zeros(1)
    for number, item in enumerate(open_):
        states, extra = _extend(history[-1], extra, fronts[item], left[item], excess[item])
        fits = (states.n_bytes + sum(smallest[number + 1 :]) <= room) & (extra <= gap)
        states, extra = states.take(fits), extra[fits]
        kept = _pareto(states)
        states, extra = states.take(kept), extra[kept]
        if len(extra) > _MAX_STATES:
            best = np.sort(np.argsort(extra, kind="stable")[:_MAX_STATES])
            states, extra = states.take(best), extra[best]
        history.append(states)
    last = history[-1]
    if not len(last.sensitivity):
        return start.picks
    state = int(np.argmin(last.sensitivity))
    for number in range(len(open_), 0, -1):
        picks[open_[number - 1]] = int(history[number].pick[state])
        state = int(history[number].before[state])
    better = sum(front[pick].sensitivity for front, pick in zip(fronts, picks, strict=True))
    return picks if better < sensitivity else start.picks


def _extend(
    states: _States,
    extra: npt.NDArray[np.float64],
    front: Sequence[BudgetChoice],
    picks: npt.NDArray[np.int64],
    excess: npt.NDArray[np.float64],
) -> tuple[_States, npt.NDArray[np.float64]]:
    """Return all states with each of an item's choices added, and their costs above the cheapest."""
    n_states, n_picks = len(states.sensitivity), len(picks)
    sizes = np.array([front[pick].n_bytes for pick in picks], np.int64)
    sensitivities = np.array([front[pick].sensitivity for pick in picks])
    return _States(
        (states.n_bytes[:, np.newaxis] + sizes).ravel(),
        (states.sensitivity[:, np.newaxis] + sensitivities).ravel(),
        np.repeat(np.arange(n_states), n_picks),
        np.tile(picks, n_states),
    ), (extra[:, np.newaxis] + excess[picks]).ravel()


def _pareto(states: _States) -> npt.NDArray[np.int64]:
    """Return the numbers of the states that no other beats in both bytes and sensitivity, by bytes."""
    order = np.lexsort((states.sensitivity, states.n_bytes))
    least = np.minimum.accumulate(states.sensitivity[order])
    new = np.ones(len(order), np.bool_)
    new[1:] = states.sensitivity[order][1:] < least[:-1]
    kept: npt.NDArray[np.int64] = order[new]
    return kept
