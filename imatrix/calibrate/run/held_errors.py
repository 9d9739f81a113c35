"""Errors of an encoding on held-out rows: their sum, which decides, and those of chunks, for the report."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from imatrix.calibrate.statistics.gradient_factors import OutputBlock
from imatrix.calibrate.statistics.inputs import HeldPlaces
from imatrix.forward.device import to_numpy, to_torch


@dataclass(frozen=True, eq=False)
class HeldErrors:
    """Squared errors of products of some rows of a matrix.

    by_row    float64 (n_held,), of each held-out row; empty without any
    by_chunk  for a token of each chunk: in nats where the gradients are known
    """

    by_row: npt.NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))
    by_chunk: Mapping[int, float] = field(default_factory=dict)

    @property
    def total(self) -> float:
        """The sum over all held-out rows."""
        return float(self.by_row.sum())

    def is_close_to(self, other: HeldErrors) -> bool:
        """Whether the same rows can't tell which of two encodings is better.

        Their difference is less than two of its standard errors, were its mean zero. Rounding is chaotic:
        sums that come in another order give other bytes, as good as these, and the choice may be another.
        """
        moved = self.by_row - other.by_row
        return bool(abs(moved.sum()) < 2 * np.linalg.norm(moved))

    @classmethod
    def of(cls, errors: torch.Tensor, places: HeldPlaces, block: OutputBlock | None) -> HeldErrors:
        """Sum up errors of products, float32 (n_held, n_outputs).

        A block weighs errors of different outputs by the covariance of their gradients; without one all count
        alike. With one, those of a chunk are half of tr(G E H E^T) for a token: about the divergence that
        they cause, in nats.
        """
        weighed = errors if block is None else errors @ to_torch(block.covariance)
        by_row = (weighed.double() * errors).sum(1) * places.shares
        chunks, numbers = places.chunks.unique(return_inverse=True)
        in_nats = by_row * (1.0 if block is None else block.mean_square / 2)
        sums = torch.zeros(len(chunks), dtype=torch.float64).index_add(0, numbers, in_nats)
        return cls(to_numpy(by_row), dict(zip(chunks.tolist(), sums.tolist(), strict=True)))

    @classmethod
    def sum(cls, parts: Iterable[HeldErrors]) -> HeldErrors:
        """Add up those of all rows of a matrix."""
        parts, by_chunk = list(parts), dict[int, float]()
        for part in parts:
            for chunk, error in part.by_chunk.items():
                by_chunk[chunk] = by_chunk.get(chunk, 0.0) + error
        return cls(np.sum([part.by_row for part in parts], axis=0), by_chunk)
