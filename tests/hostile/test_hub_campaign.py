"""A few answers of a Hub that means harm; scripts/check/hub_answers.py tries as many as one likes."""

from __future__ import annotations

import pytest

from scripts.check.hub_answers import LINE, RIGHT, attack, campaign


def test_a_few_hostile_answers() -> None:
    outcome = attack(60, seed=3)
    assert outcome.failures == []
    assert outcome.counts["hostile answers"] >= 60
    assert outcome.counts[RIGHT] + outcome.counts[LINE] == outcome.counts["runs"]


@pytest.mark.slow
def test_the_counts_of_answers() -> None:
    counts = campaign(500, seed=4)
    assert counts.keys() == {RIGHT, LINE}
    assert sum(counts.values()) >= 500
