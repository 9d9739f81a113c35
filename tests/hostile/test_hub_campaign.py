"""A little of the campaign against a Hub that means harm; scripts/attack_hub.py runs as much as one likes."""

from __future__ import annotations

import pytest

from scripts.attack_hub import LINE, RIGHT, attack, campaign


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
