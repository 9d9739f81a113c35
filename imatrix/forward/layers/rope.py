"""RoPE: pairs of columns are rotated by position * frequency[i].

Pair i is columns 2i and 2i + 1, or columns i and i + n/2 of n, as the model has it.

YaRN slows down the frequencies that turn rarely within the original context by its factor. It leaves those
that turn often, and blends in between (arXiv 2309.00071, section 3.2). Attention gets sharper in return: what
is rotated may be scaled by `magnitude`, and scores by the square of `attention_factor`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from convert.architectures.decoder.rope import Yarn
from imatrix.forward.device import to_cpu


@dataclass(frozen=True)
class Rope:
    """The rotation of a model.

    n_cols     columns that are rotated, two for each frequency
    theta      base of the frequencies
    yarn       None for plain RoPE
    magnitude  what rotated columns are multiplied by
    halves     whether a pair is half of n_cols apart; neighbours otherwise
    slowed     what all frequencies are divided by
    divisors   what the frequency of each pair is divided by, (n_cols / 2,); None for nothing
    """

    n_cols: int
    theta: float
    yarn: Yarn | None = None
    magnitude: float = 1.0
    halves: bool = False
    slowed: float = 1.0
    divisors: torch.Tensor | None = None

    def frequencies(self) -> torch.Tensor:
        """Return the angle per position of each pair, float32 (n_cols / 2,)."""
        exponents = torch.arange(0, self.n_cols, 2, dtype=torch.float32) / self.n_cols
        plain = 1.0 / self.theta**exponents
        if self.divisors is not None:
            plain = plain / to_cpu(self.divisors)
        if self.slowed != 1.0:
            plain = plain / self.slowed
        if self.yarn is None:
            return plain
        slow = _share_slowed(self.yarn, self.n_cols, self.theta)
        return plain / self.yarn.factor * slow + plain * (1 - slow)

    def rotation(self, n_positions: int, device: torch.device) -> Rotation:
        """Return the rotation of positions 0 to n_positions - 1."""
        angles = torch.outer(torch.arange(n_positions, dtype=torch.float32), self.frequencies())
        return Rotation(torch.polar(torch.full_like(angles, self.magnitude), angles).to(device), self.halves)


@dataclass(frozen=True)
class Rotation:
    """The complex number that each pair is multiplied by, complex64 (n_positions, n_cols / 2).

    halves  whether a pair is half of the columns apart; neighbours otherwise
    """

    turns: torch.Tensor
    halves: bool = False

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return `x`, (n_tokens, n_heads, n_cols), rotated; float32. They are at the first positions."""
        turns = self.turns[: len(x), None]
        if self.halves:
            first, second = x.float().chunk(2, -1)
            cosines, sines = turns.real, turns.imag
            return torch.cat((first * cosines - second * sines, second * cosines + first * sines), -1)
        pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)).contiguous())
        return torch.view_as_real(pairs * turns).flatten(-2)

    def sharpness(self, growth: tuple[float, int] | None, offset: int = 0) -> torch.Tensor | None:
        """Compute what the scores of every position are multiplied by, float32 (n_positions,).

        growth  s and n: at position p, 1 + s ln(1 + floor((p + offset) / n)); None: nothing, and None is
                returned
        """
        if growth is None:
            return None
        scale, length = growth
        whole = (torch.arange(len(self.turns), device=self.turns.device) + offset) // length
        return 1 + scale * torch.log1p(whole.float())

    def back(self) -> Rotation:
        """Return the rotation that undoes this one, but for its magnitude."""
        return replace(self, turns=self.turns.conj().resolve_conj())


def _share_slowed(yarn: Yarn, n_cols: int, theta: float) -> torch.Tensor:
    """Compute how far each pair is slowed down, 0 to 1: a ramp between two pairs."""

    def pair_that_turns(times: float) -> float:
        """Find the pair that turns so many times in the original context."""
        return n_cols * math.log(yarn.original_context / (times * 2 * math.pi)) / (2 * math.log(theta))

    start, end = pair_that_turns(yarn.beta_fast), pair_that_turns(yarn.beta_slow)
    if yarn.truncate:
        start, end = math.floor(start), math.ceil(end)
    first, last = max(start, 0), min(end, n_cols - 1)
    width = max(last - first, 1e-3)
    return ((torch.arange(n_cols // 2, dtype=torch.float32) - first) / width).clamp(0, 1)
