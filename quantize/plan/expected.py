"""The divergence to expect of a file, from the sum of its tensors' damages.

The sum is of the second order. What a file really has is larger: errors send tokens to other experts. How
much larger was seen on the sample model in `examples/`: 13 stock files from IQ1_M to Q6_K, predicted without
evaluating any, then measured on two other texts (docs/budget.md, scripts/predict_divergence.py).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

FACTOR = 1.9
"""Real divergence over the sum of damages, the geometric mean of the 13 files."""

DEVIATION = 0.16
"""Standard deviation of the logarithm of real over predicted, the larger of the two texts'."""

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


def expected_divergence(damage: float) -> Expected:
    """Return what divergence to expect where damages add up to this.

    >>> str(expected_divergence(0.004))
    '0.00760 (0.00529 to 0.01091)'
    """
    middle = FACTOR * damage
    spread = math.exp(_WIDTH * DEVIATION * math.sqrt(1 + 1 / N_FILES))
    return Expected(middle / spread, middle, middle * spread)
