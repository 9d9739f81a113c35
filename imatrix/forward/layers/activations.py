"""Activations of feed-forward blocks: of what gate and up make, or up alone where there is no gate."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch.nn.functional import gelu, silu, softplus

Gated = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Activation of what gate and up make, (n_tokens, width) both."""

Ungated = Callable[[torch.Tensor], torch.Tensor]
"""Activation of what up makes where there is no gate."""


@dataclass(frozen=True)
class SiLU:
    """silu(gate) * up, the usual activation.

    limit  what gate is clamped to from above, up from both sides; None: not at all
    after  whether it is silu(gate) that the limit holds for, as in Ling 3, and not gate, as in DeepSeek V4
    """

    limit: float | None = None
    after: bool = False

    def __call__(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        if self.limit is None:
            return silu(gate) * up if gate.requires_grad else silu(gate, inplace=True).mul_(up)
        up = up.clamp(-self.limit, self.limit)
        return (silu(gate).clamp(max=self.limit) if self.after else silu(gate.clamp(max=self.limit))) * up


USUAL: Gated = SiLU()

_CLAMP, _SHARPNESS = 7.0, 1.702
"""Where gpt-oss clamps its gate from above, and up from both sides; and how steep its gate is."""


def clamped(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Apply gpt-oss's gate: gate * sigmoid(1.702 * gate) * (up + 1), both clamped."""
    gate, up = gate.clamp(max=_CLAMP), up.clamp(-_CLAMP, _CLAMP)
    return gate * torch.sigmoid(_SHARPNESS * gate) * (up + 1)


ByTanh = Literal["tanh", "none"]
"""GELU approximated by tanh, or GELU itself, by torch's names."""


@dataclass(frozen=True)
class GELU:
    """GELU of what up makes."""

    approximate: ByTanh

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return gelu(x, approximate=self.approximate)


@dataclass(frozen=True)
class GatedGELU:
    """gelu(gate) * up."""

    approximate: ByTanh

    def __call__(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return gelu(gate, approximate=self.approximate) * up


@dataclass(frozen=True)
class SparseGELU:
    """gelu(relu(gate - cutoff)) * up, as in Gemma 3n: few numbers of gate are above the cutoff.

    deviations  how many standard deviations above the mean of a token's gate the cutoff is. The deviation is
                that of a sample, as in llama.cpp; that of transformers is smaller, by 3e-5 in 16,384 columns
    """

    deviations: float

    def __call__(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        numbers = gate.float()
        cutoff = numbers.mean(-1, keepdim=True) + numbers.std(-1, keepdim=True) * self.deviations
        return gelu((numbers - cutoff).relu().to(gate.dtype), approximate="tanh") * up


def squared_relu(x: torch.Tensor) -> torch.Tensor:
    """Apply Nemotron's relu(x) ** 2."""
    return x.relu().square()


@dataclass(frozen=True)
class XIELU:
    """The activation of Apertus: a parabola above zero, and an exponential that flattens below.

    alpha_n, alpha_p  how much the part below zero and that above it are bent, before softplus
    beta              the slope at zero
    eps               the largest number whose exponential is taken, just below zero
    """

    alpha_n: float
    alpha_p: float
    beta: float
    eps: float

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        alpha_n, alpha_p = softplus(torch.tensor([self.alpha_n, self.alpha_p])).tolist()
        below = (torch.expm1(x.clamp(max=self.eps)) - x) * (self.beta + alpha_n)
        return torch.where(x > 0, alpha_p * x * x, below) + self.beta * x


@dataclass(frozen=True)
class Situ:
    """The activation of Kimi K3: beta tanh(gate / beta) sigmoid(gate), times up.

    up_beta  bounds up in the same way, up_beta tanh(up / up_beta); None for no bound
    """

    beta: float
    up_beta: float | None

    def __call__(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        if self.up_beta is not None:
            up = _bounded(up, self.up_beta)
        return _bounded(gate, self.beta) * torch.sigmoid(gate) * up


def _bounded(x: torch.Tensor, bound: float) -> torch.Tensor:
    return bound * torch.tanh(x / bound)
