"""Correction of weights for the drift of their inputs away from the original's.

The original computes W t and the model V x, where x has moved away from t. The V that makes the sum of
|W t - V x|^2 least is W C H^-1, with H the sum of x x^T and C the sum of t x^T. Where little text was seen,
V must stay near W, so the sum of d |W - V|^2 is added:

    V = W + W T,   T = (C - H) (H + d I)^-1

Rounding then aims at V instead of W.
"""

from __future__ import annotations

import numpy as np

from calibrate.rounding.factor import Factor
from calibrate.statistics.inputs import Held
from calibrate.statistics.moments import Statistics
from forward.device import to_numpy, to_torch
from forward.workers import Workers
from quantize.formats.base import Floats32

_STRIP_ROWS = 512
"""Rows of T that are computed at a time."""


def correction(statistics: Statistics, factor: Factor, workers: Workers) -> Floats32 | None:
    """Return T, float32 (n_cols, n_cols); None where the inputs are the original's.

    factor  of the statistics: d is what it was damped by
    """
    own, cross = statistics.own, statistics.cross
    if cross is None:
        return None
    upper = to_torch(factor.upper)
    change = np.empty(own.shape, np.float32)

    def take(start: int) -> None:
        rows = slice(start, start + _STRIP_ROWS)
        moved = to_torch(((cross[rows] - own[rows]) / factor.mean).astype(np.float32))
        change[rows] = to_numpy(moved @ upper.T @ upper)

    for _ in workers.each(take, range(0, len(own), _STRIP_ROWS)):
        pass
    return change


def corrected(rows: Floats32, change: Floats32, held: Held | None = None) -> Floats32:
    """Return W + a W T of some rows, float32 (n_rows, n_cols).

    held  held-out rows: a, from 0 to 1, is what makes up best for their drift. Where little text
          was seen, T is mostly noise, and a is small. None: a is 1
    """
    weights = to_torch(rows)
    product = weights @ to_torch(change)
    if held is not None:
        moved = (held.originals - held.x) @ weights.T
        made_up = held.x @ product.T
        total = float(made_up.double().square().sum())
        share = float((moved.double() * made_up).sum()) / total if total else 0.0
        product *= min(1.0, max(0.0, share))
    aimed: Floats32 = to_numpy(weights + product)
    return aimed
