"""What divergence to expect of a file."""

from __future__ import annotations

import math
import statistics

import pytest

from quantize.plan.sensitivities import (
    DENSE_FACTOR,
    DEVIATION,
    FACTOR,
    Sensitivities,
    TensorSensitivity,
    expected_divergence,
    is_routed,
    level_of,
)

MEASURED = {
    "IQ1_M": (0.13515, 0.22682), "IQ2_XXS": (0.08926, 0.13448), "IQ2_XS": (0.07408, 0.10289),
    "IQ2_M": (0.04322, 0.06051), "Q2_K": (0.05086, 0.08489), "IQ3_XXS": (0.02571, 0.03720),
    "IQ3_S": (0.01848, 0.02732), "Q3_K_M": (0.01400, 0.02130), "IQ4_XS": (0.00519, 0.00889),
    "Q4_0": (0.00617, 0.00975), "Q4_K_M": (0.00410, 0.00734), "Q5_K_M": (0.00132, 0.00305),
    "Q6_K": (0.00061, 0.00135),
}  # fmt: skip
"""Sum of damages, and divergence on a text of another kind, of stock files of the sample model."""


def test_files_of_the_sample_model_are_told_apart() -> None:
    logs = [math.log(real / level_of(damage, routed=True)) for damage, real in MEASURED.values()]
    assert statistics.stdev(logs) < 0.1
    assert math.exp(statistics.mean(logs)) == pytest.approx(FACTOR, rel=0.05)
    for damage, real in MEASURED.values():
        expected = expected_divergence(damage, routed=True)
        assert expected.low < real < expected.high


def test_the_range_is_as_wide_as_two_deviations_and_what_thirteen_files_leave_open() -> None:
    expected = expected_divergence(0.01, routed=False)
    assert expected.middle == pytest.approx(0.01 * DENSE_FACTOR)
    up, down = math.log(expected.high / expected.middle), math.log(expected.middle / expected.low)
    assert up == pytest.approx(down)
    assert 2 * DEVIATION < up < 2.5 * DEVIATION


def test_damage_that_is_nothing_stays_nothing() -> None:
    assert str(expected_divergence(0.0, routed=True)) == "0.00000 (0.00000 to 0.00000)"


def test_a_model_is_routed_if_it_has_stacks_of_experts() -> None:
    dense = {"blk.0.ffn_down.weight": TensorSensitivity((8, 256), {"Q4_K": 0.1})}
    heads = {"blk.0.attn_k_b.weight": TensorSensitivity((4, 8, 256), {"Q4_K": 0.1})}
    experts = {"blk.0.ffn_down_exps.weight": TensorSensitivity((4, 8, 256), {"Q4_K": 0.1})}
    assert not is_routed(Sensitivities(dense | heads))
    assert is_routed(Sensitivities(dense | experts))
