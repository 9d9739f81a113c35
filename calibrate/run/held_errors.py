"""Errors of an encoding on held-out rows: their sum, which decides, and those of chunks, for the report."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch

from calibrate.statistics.gradient_factors import OutputBlock
from calibrate.statistics.inputs import HeldPlaces
from forward.device import to_torch


@dataclass(frozen=True)
class HeldErrors:
    """Squared errors of products of some rows of a matrix.

    total     over all held-out rows that count
    by_chunk  for a token of each chunk: in nats where the gradients are known
    """

    total: float = 0.0
    by_chunk: Mapping[int, float] = field(default_factory=dict)

    @classmethod
    def of(cls, errors: torch.Tensor, places: HeldPlaces, block: OutputBlock | None) -> HeldErrors:
        """Sum up errors of products, float32 (n_held, n_outputs).

        A block weighs errors of different outputs by the covariance of their gradients; without one all count
        alike. With one, those of a chunk are half of tr(G E H E^T) for a token: about the divergence that
        they cause, in nats.
        """
        weighed = errors if block is None else errors @ to_torch(block.covariance)
        squares = weighed.double() * errors
        by_row = squares.sum(1) * places.shares * (1.0 if block is None else block.mean_square / 2)
        chunks, numbers = places.chunks.unique(return_inverse=True)
        sums = torch.zeros(len(chunks), dtype=torch.float64).index_add(0, numbers, by_row)
        total = float((squares.sum(1) * places.shares).sum())
        return cls(total, dict(zip(chunks.tolist(), sums.tolist(), strict=True)))

    @classmethod
    def sum(cls, parts: Iterable[HeldErrors]) -> HeldErrors:
        """Add up those of all rows of a matrix."""
        total, by_chunk = 0.0, dict[int, float]()
        for part in parts:
            total += part.total
            for chunk, error in part.by_chunk.items():
                by_chunk[chunk] = by_chunk.get(chunk, 0.0) + error
        return cls(total, by_chunk)
