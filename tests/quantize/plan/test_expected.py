"""What divergence to expect of a file."""

from __future__ import annotations

import math

import pytest

from quantize.plan.expected import DEVIATION, FACTOR, expected_divergence


def test_the_range_is_as_wide_as_two_deviations_and_what_thirteen_files_leave_open() -> None:
    expected = expected_divergence(0.01)
    assert expected.middle == pytest.approx(0.01 * FACTOR)
    up, down = math.log(expected.high / expected.middle), math.log(expected.middle / expected.low)
    assert up == pytest.approx(down)
    assert 2 * DEVIATION < up < 2.5 * DEVIATION


def test_damage_that_is_nothing_stays_nothing() -> None:
    assert str(expected_divergence(0.0)) == "0.00000 (0.00000 to 0.00000)"
