"""Student's t distribution for any degrees of freedom, from its integral.

With t = sqrt(n) tan(x), the density for n degrees of freedom is proportional to cos(x)^(n - 1), for x from
-pi/2 to pi/2. So the mass beyond t is the integral of a smooth function over a short interval, and a fixed
Gauss-Legendre rule gives it to about 1e-12; to 1e-6 between one and two degrees.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np

_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(128)

_FARTHEST = 12.0
"""The mass beyond so many standard deviations, e^-72 of it, is nothing."""

_HALVINGS = 60


def two_sided_p(t: float, degrees: float) -> float:
    """Compute the probability of a value farther from 0 than `t`, for 1 degree of freedom or more."""
    return _mass(math.atan(abs(t) / math.sqrt(degrees)), degrees) / _mass(0.0, degrees)


@lru_cache(maxsize=256)
def two_sided_quantile(p: float, degrees: float) -> float:
    """Compute the t that a value exceeds on either side with probability `p` in all."""
    below, above, wanted = 0.0, math.pi / 2, p * _mass(0.0, degrees)
    for _ in range(_HALVINGS):
        middle = (below + above) / 2
        if _mass(middle, degrees) > wanted:
            below = middle
        else:
            above = middle
    return math.sqrt(degrees) * math.tan(below)


def _mass(start: float, degrees: float) -> float:
    """Integrate cos(x)^(degrees - 1) from `start` to where nothing is left."""
    stop = min(math.pi / 2, _FARTHEST / math.sqrt(degrees))
    if start >= stop:
        return 0.0
    half = (stop - start) / 2
    return float(half * (_WEIGHTS * np.cos(start + half * (1 + _NODES)) ** (degrees - 1)).sum())
