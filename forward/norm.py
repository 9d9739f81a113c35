"""RMS norm."""

from __future__ import annotations

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return rows of `x` scaled to a mean square of one and by `weight`; computed in float32."""
    x = x.float()
    mean_square = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(x.shape[-1])
    return (x * mean_square.add_(eps).rsqrt_()).mul_(weight)
