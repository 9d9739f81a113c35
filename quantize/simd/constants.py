"""The float32 numbers that kernels start from: a bare literal beside Floats would be a float64."""

from __future__ import annotations

import numpy as np

ZERO = np.float32(0)
QUARTER = np.float32(0.25)
HALF = np.float32(0.5)
ONE = np.float32(1)
TWO = np.float32(2)
INFINITY = np.float32(np.inf)
