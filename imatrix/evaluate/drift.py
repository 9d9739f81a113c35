"""How far a model has moved from its base after each layer: hidden states, and the experts chosen.

Only tokens count whose predictions are measured, so drift and divergence are about the same tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt
import torch

from imatrix.forward.device import to_numpy
from imatrix.forward.hidden_states import Rows
from imatrix.forward.logits import Positions
from imatrix.forward.observe import Arrays, Silent

_ROUTES = "routes"
"""Name of the chosen experts in the work folder."""


@dataclass(frozen=True)
class LayerDrift:
    """How far a model has moved from its base after one layer.

    drift            norm of the difference of the hidden states over the norm of the base's
    routing_changed  share of the base's choices of experts that the model has not made, 0 to 1; None for a
                     layer without routed experts
    """

    layer: int
    drift: float
    routing_changed: float | None

    @staticmethod
    def arrays(drifts: Sequence[LayerDrift]) -> Arrays:
        """Return the drift of one layer on several texts for the work folder; NaN stands for None."""
        numbers = [(each.drift, each.routing_changed) for each in drifts]
        return {"drift": np.array(numbers, np.float64)}

    @classmethod
    def of(cls, layer: int, arrays: Arrays, number: int) -> Self:
        """Restore the drift of a layer on one of the texts; the inverse of `arrays`."""
        drift, changed = arrays["drift"][number].tolist()
        return cls(layer, drift, None if math.isnan(changed) else changed)


class RouteObserver(Silent):
    """An Observer that keeps which experts each token went to, in the order of the tokens."""

    def __init__(self) -> None:
        self._experts: list[npt.NDArray[np.int16]] = []

    def routes(self, router: str, experts: torch.Tensor) -> None:
        self._experts.append(to_numpy(experts.to(torch.int16)))

    def fresh(self) -> Self:
        return type(self)()

    def merge(self, other: Self) -> None:
        self._experts += other._experts

    def arrays(self) -> Arrays:
        """Return the experts, int16 (n_tokens, n_used); nothing for a layer without routed experts."""
        return {_ROUTES: np.concatenate(self._experts)} if self._experts else {}


def drift_of(
    layer: int,
    positions: Positions,
    base: Rows,
    model: Rows,
    base_routes: Arrays,
    model_routes: Arrays,
    *,
    n_cols: int,
) -> LayerDrift:
    """Measure how far the hidden states after `layer` of a model are from those of its base.

    n_cols  of the hidden states; what is handed on behind them counts for nothing
    base_routes, model_routes  as `RouteObserver.arrays` returns them
    """
    difference = norm = 0.0
    for chunk in range(positions.n_chunks):
        numbers = positions.of_chunk(chunk)
        wanted, found = (states.rows(numbers)[:, :n_cols].double() for states in (base, model))
        difference += float((found - wanted).square().sum())
        norm += float(wanted.square().sum())
    drift = math.sqrt(difference / norm) if norm else (math.inf if difference else 0.0)
    changed = None
    if _ROUTES in base_routes:
        tokens = to_numpy(positions.tokens)
        wanted_routes, found_routes = base_routes[_ROUTES][tokens], model_routes[_ROUTES][tokens]
        kept = (wanted_routes[:, :, None] == found_routes[:, None, :]).any(-1)  # in any order
        changed = float(1 - kept.mean())
    return LayerDrift(layer, drift, changed)
