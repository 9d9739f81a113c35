"""The choice under a budget: against all combinations, an integer program, and its own bound."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gguf_tools.errors import BadRequest
from quantize.size.budget import BudgetChoice, Item, select


def _item(number: int, points: list[tuple[int, float]]) -> Item:
    return Item(f"item {number}", tuple(BudgetChoice(f"{i}", *point) for i, point in enumerate(points)))


def _by_trying_all(items: list[Item], budget: int) -> float:
    """Return the least damage within the budget, the slow way."""
    return min(
        sum(choice.sensitivity for choice in choices)
        for choices in itertools.product(*(item.choices for item in items))
        if sum(choice.n_bytes for choice in choices) <= budget
    )


points = st.lists(st.tuples(st.integers(1, 60), st.integers(0, 80).map(float)), min_size=1, max_size=4)


@settings(max_examples=200, deadline=None)
@given(st.lists(points, min_size=1, max_size=5), st.floats(0, 1))
def test_no_combination_is_better(all_points: list[list[tuple[int, float]]], share: float) -> None:
    items = [_item(number, each) for number, each in enumerate(all_points)]
    least = sum(min(choice.n_bytes for choice in item.choices) for item in items)
    most = sum(max(choice.n_bytes for choice in item.choices) for item in items)
    budget = least + int(share * (most - least))
    selection = select(items, budget)
    assert selection.n_bytes <= budget
    assert selection.sensitivity == _by_trying_all(items, budget)
    assert selection.bound <= selection.sensitivity + 1e-9


def _like_a_model(n_items: int, seed: int) -> list[Item]:
    """Return tensors of various sizes whose damage falls about fourfold with each bit, with noise."""
    random = np.random.default_rng(seed)
    bits = (1.75, 2.06, 2.31, 2.63, 3.06, 3.44, 4.25, 4.5, 5.5, 6.56, 8.5)
    items = []
    for number in range(n_items):
        n_elems = 256 * int(random.integers(100, 5000))
        scale = random.lognormal(0, 1.5)
        damages = scale * 4.0 ** -np.array(bits) * random.lognormal(0, 0.2, len(bits))
        items.append(
            _item(number, [(int(n_elems * b / 8), float(d)) for b, d in zip(bits, damages, strict=True)])
        )
    return items


@pytest.mark.parametrize("n_items", [12, 60])
@pytest.mark.parametrize("bits", [2.2, 3.4, 4.8])
def test_an_integer_program_finds_nothing_better(n_items: int, bits: float) -> None:
    items = _like_a_model(n_items, seed=n_items)
    budget = sum(int(item.choices[-1].n_bytes / 8.5 * bits) for item in items)
    ours = select(items, budget)
    theirs = _by_integer_program(items, budget)
    assert ours.n_bytes <= budget
    assert ours.sensitivity <= theirs * (1 + 1e-6)


def _by_integer_program(items: list[Item], budget: int) -> float:
    """Return the least damage within the budget that scipy's integer program finds."""
    optimize = pytest.importorskip("scipy.optimize")
    choices = [(number, choice) for number, item in enumerate(items) for choice in item.choices]
    unit = sum(min(choice.sensitivity for choice in item.choices) for item in items)
    one_each = np.zeros((len(items), len(choices)))
    for column, (number, _) in enumerate(choices):
        one_each[number, column] = 1
    answer = optimize.milp(
        c=[choice.sensitivity / unit for _, choice in choices],
        integrality=np.ones(len(choices)),
        bounds=optimize.Bounds(0, 1),
        constraints=[
            optimize.LinearConstraint(one_each, 1, 1),
            optimize.LinearConstraint(np.array([[choice.n_bytes / budget for _, choice in choices]]), ub=1),
        ],
        options={"mip_rel_gap": 1e-7},
    )
    assert answer.success
    return float(answer.fun * unit)


def test_a_thousand_tensors_end_close_to_the_bound() -> None:
    items = _like_a_model(1000, seed=5)
    budget = sum(int(item.choices[-1].n_bytes / 8.5 * 3.7) for item in items)
    selection = select(items, budget)
    assert selection.n_bytes <= budget
    assert selection.gap <= 1e-4 * selection.sensitivity
    assert selection.n_bytes >= 0.999 * budget


def test_room_for_everything_takes_the_least_damage() -> None:
    items = _like_a_model(5, seed=1)
    selection = select(items, 10**12)
    assert selection.sensitivity == sum(min(choice.sensitivity for choice in item.choices) for item in items)
    assert selection.gap == 0


def test_a_budget_below_the_smallest_selection_is_refused() -> None:
    items = [_item(0, [(100, 2.0), (200, 1.0)]), _item(1, [(50, 1.0)])]
    with pytest.raises(BadRequest, match="a budget of 149 bytes, and the smallest choices take 150"):
        select(items, 149)
    assert select(items, 150).n_bytes == 150
