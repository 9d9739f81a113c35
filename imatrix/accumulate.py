"""Sums of squared activations, per tensor of the model.

Sums are kept in float64: their rounding does not depend on how many rows come in one call.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from gguf_tools.errors import BadImportance
from quantize.importance import Importance

_ROWS_IN_CACHE = 256
"""How many rows are squared at a time."""


@dataclass
class Accumulator:
    """Sums that grow while a layer is computed.

    sums    name -> float64 (n_mats, n_cols)
    counts  name -> int64 (n_counts,): a count per expert, or a single one for what is not routed
    """

    sums: dict[str, torch.Tensor] = field(default_factory=dict)
    counts: dict[str, np.ndarray] = field(default_factory=dict)

    def add(self, name: str, rows: torch.Tensor) -> None:
        """Count the rows, (n_rows, n_cols) or (n_rows, n_heads, n_cols), that the matrix `name` multiplies.

        Heads are kept apart and share a count.
        """
        if rows.dim() == 2:
            rows = rows[:, None]
        self._grow(name, 1, rows.shape[1], rows.shape[2])
        self.sums[name] += sums_of_squares(rows)
        self.counts[name] += rows.shape[0]

    def add_expert(self, name: str, expert: int, n_experts: int, sums: torch.Tensor, count: int) -> None:
        """Count `count` rows with these sums of squares, float64 (n_cols,), for one expert of a stack."""
        self._grow(name, n_experts, n_experts, sums.shape[-1])
        self.sums[name][expert] += sums
        self.counts[name][expert] += count

    def _grow(self, name: str, n_counts: int, n_mats: int, n_cols: int) -> None:
        if name not in self.sums:
            self.sums[name] = torch.zeros((n_mats, n_cols), dtype=torch.float64)
            self.counts[name] = np.zeros(n_counts, np.int64)

    def refuse_nonfinite(self) -> None:
        """Raise BadImportance naming the first tensor, as they are computed, that saw NaN or infinity."""
        for name, sums in self.sums.items():
            if not bool(torch.isfinite(sums).all()):
                raise BadImportance(f"{name}: its input has NaN or infinity")

    def importances(self) -> dict[str, Importance]:
        """Return the sums as an importance matrix file holds them: heads end to end in one row."""
        return {
            name: Importance(
                sums.numpy().reshape(len(self.counts[name]), -1).astype(np.float32),
                self.counts[name].astype(np.float32),
            )
            for name, sums in self.sums.items()
        }


def sums_of_squares(rows: torch.Tensor) -> torch.Tensor:
    """Return the sum over the first axis of the squares, float64, on the CPU."""
    parts = [part.float().square().sum(0) for part in rows.split(_ROWS_IN_CACHE)]
    return torch.stack(parts).sum(0, dtype=torch.float64).cpu()
