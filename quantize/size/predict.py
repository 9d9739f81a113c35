"""Predicts a file's divergence from the sum of its tensors' sensitivities.

The sum D is of the second order, as if no token went to another expert. Whether one does is decided by a
threshold. So the share of tokens that do is proportional to the errors, which is to the square root of D, and
each costs something however small the errors are: the divergence of a model with routed experts grows as

    D + c sqrt(D)

With c, 13 stock files of the sample model from IQ1_M to Q6_K are told apart to 8 % on the text where c was
chosen, instead of 16 % (docs/budget.md, scripts/measure/predicted_divergence.py).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from quantize.plan.sensitivities import Sensitivities
from quantize.roles import Role, tensor_role

ROUTING = 0.015
"""The c of models with routed experts, square roots of nats: the same for all their files."""

FACTOR = 1.41
"""Real divergence over D + c sqrt(D), the geometric mean of the 13 files."""

DENSE_FACTOR = 0.84
"""The same over D, of 13 files of a small model of Llama's kind without experts."""

DEVIATION = 0.16
"""Standard deviation of the logarithm of that, with room for texts and models of other kinds."""

N_FILES = 13

_WIDTH = 2.18
"""The 97.5 % quantile of Student's t with 12 degrees of freedom, because 13 files say how wide it is."""


@dataclass(frozen=True)
class Expected:
    """A divergence in nats per token, and the range that has it in 19 of 20 cases."""

    low: float
    middle: float
    high: float

    def __str__(self) -> str:
        return f"{self.middle:.5f} ({self.low:.5f} to {self.high:.5f})"


def is_routed(sensitivities: Sensitivities) -> bool:
    """Whether a model has routed experts."""
    experts = Role.FFN_GATE, Role.FFN_UP, Role.FFN_DOWN
    return any(
        len(each.shape) > 2 and tensor_role(name, each.shape).role in experts
        for name, each in sensitivities.tensors.items()
    )


def level_of(sensitivity: float, *, routed: bool) -> float:
    """Return D + c sqrt(D), which grows as the divergence does.

    routed  the model has routed experts; without them there is no c
    """
    return sensitivity + (ROUTING * math.sqrt(sensitivity) if routed else 0.0)


def expected_divergence(sensitivity: float, *, routed: bool) -> Expected:
    """Predict the divergence where sensitivities add up to this; `routed` as above.

    >>> str(expected_divergence(0.004, routed=True))
    '0.00698 (0.00486 to 0.01002)'
    """
    middle = (FACTOR if routed else DENSE_FACTOR) * level_of(sensitivity, routed=routed)
    spread = math.exp(_WIDTH * DEVIATION * math.sqrt(1 + 1 / N_FILES))
    return Expected(middle / spread, middle, middle * spread)
