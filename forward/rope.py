"""RoPE on interleaved pairs: columns 2i and 2i + 1 are rotated by position * frequency[i]; with YaRN.

YaRN slows down the frequencies that turn rarely within the original context by its factor, leaves those
that turn often, and blends in between (arXiv 2309.00071, section 3.2). Attention is made up for twice:
rotated parts are multiplied by `Yarn.rotary_factor`, and the softmax scale by the square of
0.1 * mscale_all_dim * ln(factor) + 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from convert.architectures.deepseek2.config import DeepseekConfig, Yarn


@dataclass(frozen=True)
class Rotation:
    """By which complex number each pair is multiplied, complex64 (n_positions, n_cols / 2)."""

    turns: torch.Tensor

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return `x`, (n_positions, n_heads, n_cols), rotated; float32."""
        pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)).contiguous())
        return torch.view_as_real(pairs * self.turns[:, None]).flatten(-2)


def rotation(config: DeepseekConfig, n_positions: int, device: torch.device) -> Rotation:
    """Return the rotation of positions 0 to n_positions - 1."""
    angles = torch.outer(torch.arange(n_positions, dtype=torch.float32), frequencies(config))
    factor = 1.0 if config.yarn is None else config.yarn.rotary_factor
    return Rotation(torch.polar(torch.full_like(angles, factor), angles).to(device))


def frequencies(config: DeepseekConfig) -> torch.Tensor:
    """Return the angle per position of each pair, float32 (qk_rope_head_dim / 2,)."""
    n_cols = config.qk_rope_head_dim
    plain = 1.0 / config.rope_theta ** (torch.arange(0, n_cols, 2, dtype=torch.float32) / n_cols)
    if config.yarn is None:
        return plain
    slow = _share_slowed(config.yarn, n_cols, config.rope_theta)
    return plain / config.yarn.factor * slow + plain * (1 - slow)


def _share_slowed(yarn: Yarn, n_cols: int, theta: float) -> torch.Tensor:
    """Return how far each pair is slowed down, 0 to 1: a ramp between two pairs."""

    def pair_that_turns(times: float) -> float:
        """Return which pair turns so many times in the original context."""
        return n_cols * math.log(yarn.original_context / (times * 2 * math.pi)) / (2 * math.log(theta))

    first = max(math.floor(pair_that_turns(yarn.beta_fast)), 0)
    last = min(math.ceil(pair_that_turns(yarn.beta_slow)), n_cols - 1)
    width = max(last - first, 1e-3)
    return ((torch.arange(n_cols // 2, dtype=torch.float32) - first) / width).clamp(0, 1)


def softmax_scale(config: DeepseekConfig) -> float:
    """Return what scores are multiplied with before the softmax."""
    scale = config.qk_head_dim**-0.5
    yarn = config.yarn
    if yarn is None or not yarn.mscale_all_dim or yarn.factor <= 1:
        return scale
    mscale = 0.1 * yarn.mscale_all_dim * math.log(yarn.factor) + 1.0
    return scale * mscale * mscale
