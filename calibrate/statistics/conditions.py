"""What rows are encoded under: the statistics of their inputs, factored, and the correction for drift.

Held-out chunks show whether a tensor has become better on text that it was not encoded under. A text of one
chunk leaves none, and those of nonsense are more of the same. Then drift is not corrected: unchecked, the
correction would fit the noise of the text.

Drift is how far inputs have moved away from the original's. The original computes W t and the model V x,
where x has moved away from t. The V that makes the sum of |W t - V x|^2 least is W C H^-1, with H the sum of
x x^T and C the sum of t x^T. Where little text was seen, V must stay near W, so the sum of d |W - V|^2 is
added:

    V = W + W T,   T = (C - H) (H + d I)^-1

Rounding then aims at V instead of W. T has an unknown for each pair of columns, and must hold on other texts,
too. So d is larger than what H is damped by where weights are rounded under it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Self

import numpy as np

from calibrate.rounding.factor import Factor
from calibrate.statistics.inputs import Held, Statistics
from calibrate.statistics.trust import Trust
from forward.device import to_numpy, to_torch
from forward.workers import Workers
from gguf_tools.errors import BadActivation, BadMoments
from quantize.formats.base import Floats32

_STRIP_ROWS = 512
"""Rows of T that are computed at a time."""


def correction(statistics: Statistics, upper: Floats32, mean: float, workers: Workers) -> Floats32 | None:
    """Return T, float32 (n_cols, n_cols); None where the inputs are the original's.

    upper  float32 (n_cols, n_cols), U with U^T U = (H / mean + d I)^-1
    """
    own, cross = statistics.own, statistics.cross
    if cross is None:
        return None
    inverse_root = to_torch(upper)
    change = np.empty(own.shape, np.float32)

    def take(start: int) -> None:
        rows = slice(start, start + _STRIP_ROWS)
        moved = to_torch(((cross[rows] - own[rows]) / mean).astype(np.float32))
        change[rows] = to_numpy(moved @ inverse_root.T @ inverse_root)

    for _ in workers.each(take, range(0, len(own), _STRIP_ROWS)):
        pass
    return change


def corrected(rows: Floats32, change: Floats32, held: Held | None = None) -> Floats32:
    """Return W + a W T of some rows, float32 (n_rows, n_cols).

    held  held-out rows: a, from 0 to 1, is what makes up best for the drift of those that count. Where
          little text was seen, T is mostly noise, and a is small. None: a is 1
    """
    weights = to_torch(rows)
    product = weights @ to_torch(change)
    if held is not None:
        x, counts = held.x, held.places.counts[:, None]
        moved = (held.originals - x) @ weights.T * counts
        made_up = x @ product.T * counts
        total = float(made_up.double().square().sum())
        share = float((moved.double() * made_up).sum()) / total if total else 0.0
        product *= min(1.0, max(0.0, share))
    aimed: Floats32 = to_numpy(weights + product)
    return aimed


@dataclass(frozen=True)
class Conditions:
    """The conditions of some rows.

    importances  of the columns, see `Statistics.importances`; None where nothing was seen
    n_seen       rows of their own inputs that were seen
    factor       of the second moments; None where these can't be used
    correction   T, float32 (n_cols, n_cols): rounding aims at W + a W T. None: no correction
    held         held-out rows, on which encodings are compared; None: there are none
    """

    importances: Floats32 | None
    n_seen: int
    factor: Factor | None
    correction: Floats32 | None
    held: Held | None

    @classmethod
    def nothing(cls) -> Self:
        """Return empty conditions, for rows whose inputs were never observed."""
        return cls(None, 0, None, None, None)

    def aim(self, rows: Floats32) -> Floats32:
        """Return what rounding aims at: rows with the correction, float32 (n_rows, n_cols)."""
        return rows if self.correction is None else corrected(rows, self.correction, self.held)


def conditions_of(
    inputs: Iterable[tuple[Statistics, Held | None]],
    name: str,
    workers: Workers,
    trust: Trust,
    n_real: int | None = None,
) -> Iterator[Conditions]:
    """Yield the conditions that follow from statistics, each with its held-out rows.

    name    of a matrix, for messages
    n_real  its columns without padding; None: all
    raises  BadActivation for NaN or infinity in the matrix's input
    """

    def factors_of(each: tuple[Statistics, Held | None]) -> tuple[Statistics, Held | None, _Factors]:
        statistics, held = each
        if not statistics.is_finite:
            raise BadActivation(f"{name}: its input has NaN or infinity")
        return statistics, held, _Factors.of(statistics, trust, n_real)

    for statistics, held, factors in workers.each(factors_of, inputs):
        change = None if factors.drift is None else correction(statistics, *factors.drift, workers)
        importances = statistics.importances() if statistics.n_rows else None
        yield Conditions(importances, statistics.n_seen, factors.rounding, change, held)


@dataclass(frozen=True)
class _Factors:
    """What is made of second moments; nothing where these can't be used.

    rounding  their factor
    drift     U and the mean of a factor that is damped more, see `correction`; None without drift
    """

    rounding: Factor | None = None
    drift: tuple[Floats32, float] | None = None

    @classmethod
    def of(cls, statistics: Statistics, trust: Trust, n_real: int | None) -> Self:
        own, n_rows = statistics.own, statistics.n_rows
        if not n_rows:
            return cls()
        n_cols, drift = n_real or len(own), None
        try:
            if statistics.cross is not None:
                damped = Factor.of(own, trust.drift_damp(n_rows, n_cols), n_real)
                drift = damped.upper, damped.mean
                del damped  # whose own copy of the moments is as large as they are
            return cls(Factor.of(own, trust.input_damp(n_rows, n_cols), n_real), drift)
        except BadMoments:
            return cls()
