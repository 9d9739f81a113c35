"""RMS norm."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class RMSNorm:
    """A norm with its weight, float32 (n_cols,)."""

    weight: torch.Tensor
    eps: float

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the rows of `x` scaled to a mean square of one and by the weight; computed in float32."""
        return unit_rows(x, self.eps).mul_(self.weight)


def unit_rows(x: torch.Tensor, eps: float) -> torch.Tensor:
    """Return the rows of `x` scaled to a mean square of one, float32."""
    x = x.float()
    # What a differentiated pass keeps of the first two is their results, so those are not overwritten.
    mean_square = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square().div_(x.shape[-1])
    return x * mean_square.add_(eps).rsqrt_()
