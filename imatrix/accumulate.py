"""Sums of squared activations, per tensor of the model, in float64."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import torch

from gguf_tools.errors import BadImportance
from forward.kernels import sums_of_squares
from quantize.importance import Importance


@dataclass
class Accumulator:
    """Sums that grow while a layer is computed.

    sums    name -> float64 (n_mats, n_cols)
    counts  name -> int64 (n_counts,): a count per expert, or a single one for what is not routed
    """

    sums: dict[str, torch.Tensor] = field(default_factory=dict)
    counts: dict[str, np.ndarray] = field(default_factory=dict)

    def add(self, names: Iterable[str], rows: torch.Tensor) -> None:
        """Count the rows, (n_rows, n_cols), that each of the matrices `names` multiplies."""
        sums = sums_of_squares(rows[None])
        for name in names:
            self.add_heads(name, sums, len(rows))

    def add_heads(self, name: str, sums: torch.Tensor, count: int) -> None:
        """Count `count` rows per head with these sums of squares, float64 (n_heads, n_cols)."""
        self._grow(name, 1, *sums.shape)
        self.sums[name] += sums
        self.counts[name] += count

    def add_expert(self, name: str, expert: int, n_experts: int, sums: torch.Tensor, count: int) -> None:
        """Count `count` rows with these sums of squares, float64 (n_cols,), for one expert of a stack."""
        self._grow(name, n_experts, n_experts, sums.shape[-1])
        self.sums[name][expert] += sums
        self.counts[name][expert] += count

    def merge(self, other: Accumulator) -> None:
        """Add what `other` has seen."""
        for name, sums in other.sums.items():
            counts = other.counts[name]
            self._grow(name, len(counts), *sums.shape)
            self.sums[name] += sums
            self.counts[name] += counts

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
