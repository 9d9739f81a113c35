"""The obvious observer: float64 sums of squares, and counts, of whole stacks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

Activations = Any
"""torch.Tensor; torch need not be there where this is imported."""


@dataclass
class Sums:
    """What one tensor has seen: squares, float64 (n_mats, n_cols), and counts, int64 (n_experts,) or (1,)."""

    squares: np.ndarray
    counts: np.ndarray


class NaiveSums:
    """An Observer that keeps sums of squares."""

    def __init__(self) -> None:
        self.sums: dict[str, Sums] = {}

    def rows(self, names: Sequence[str], x: Activations) -> None:
        for name in names:
            self.heads(name, 0, 1, x[:, None])

    def heads(self, name: str, first: int, n_heads: int, x: Activations) -> None:
        squares = x.double().square().sum(0).numpy()
        sums = self._sums_of(name, n_heads, 1, squares.shape[1])
        sums.squares[first : first + len(squares)] += squares
        if first == 0:
            sums.counts += len(x)

    def row_groups(self, name: str, x: Activations) -> None:
        self.heads(name, 0, x.shape[1], x)

    def expert(self, names: Sequence[str], expert: int, n_experts: int, x: Activations) -> None:
        for name in names:
            sums = self._sums_of(name, n_experts, n_experts, x.shape[1])
            sums.squares[expert] += x.double().square().sum(0).numpy()
            sums.counts[expert] += len(x)

    def routes(self, router: str, experts: Activations) -> None:
        pass

    def fresh(self) -> Self:
        return type(self)()

    def merge(self, other: Self) -> None:
        for name, sums in other.sums.items():
            mine = self._sums_of(name, len(sums.squares), len(sums.counts), sums.squares.shape[1])
            mine.squares += sums.squares
            mine.counts += sums.counts

    def refuse_nonfinite(self) -> None:
        assert all(np.isfinite(sums.squares).all() for sums in self.sums.values())

    def arrays(self) -> dict[str, np.ndarray]:
        return {name: sums.squares for name, sums in self.sums.items()}

    def _sums_of(self, name: str, n_mats: int, n_counts: int, n_cols: int) -> Sums:
        if name not in self.sums:
            self.sums[name] = Sums(np.zeros((n_mats, n_cols)), np.zeros(n_counts, np.int64))
        return self.sums[name]
