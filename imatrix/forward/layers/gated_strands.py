"""Strands of hidden states that a gate mixes, as in Qwen4Exp.

Each strand of a token is normed by itself. What a part of a layer sees is the mean of the strands, each
column times the sigmoid of a gate, which a matrix of low rank makes of all strands together. Every strand
takes the part's output times a share of its own, twice a sigmoid: 1 where the matrix of shares gives 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import silu

from imatrix.forward.layers.attention.shared_keys import Projection
from imatrix.forward.layers.load import Loader
from imatrix.forward.layers.residual import ResidualStream, RMSNorm, unit_rows
from imatrix.forward.observe import Observer, Silent


@dataclass(frozen=True)
class StrandNorm:
    """Norm of each strand by itself; the weight is that of all, float32 (n_strands * hidden_size,)."""

    norm: RMSNorm
    n_strands: int

    def __call__(self, strands: torch.Tensor) -> torch.Tensor:
        """Norm strands side by side, (n_tokens, n_strands * hidden_size); float32."""
        each = unit_rows(strands.unflatten(-1, (self.n_strands, -1)), self.norm.eps)
        return each.flatten(-2) * self.norm.weight


@dataclass(frozen=True)
class GatedStrands:
    """Residual around one part of a layer, or the end of a model.

    norm    of the strands
    down, up  make the gate, (rank, n_strands * hidden_size) and the other way round
    inject  makes the shares, (n_strands, n_strands * hidden_size); None at the end of a model
    """

    norm: StrandNorm
    down: Projection
    up: Projection
    inject: Projection | None

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the mixed strands, float32 (n_tokens, hidden_size)."""
        return self.mixed(self.norm(hidden), Silent())

    def mixed(self, normed: torch.Tensor, observer: Observer) -> torch.Tensor:
        """Return the mean of normed strands, with their gates."""
        n_strands, dtype = self.norm.n_strands, self.down.weight.dtype
        low = silu(self.down(normed.to(dtype), observer) / n_strands)
        observer.rows((self.up.name,), low)
        gate = torch.sigmoid(self.up(low, observer).float())
        return (gate * normed).unflatten(-1, (n_strands, -1)).mean(1)

    def enter(self, hidden: torch.Tensor, observer: Observer) -> ResidualStream:
        """Split one chunk's strands into the part's input and what goes past it; see `Residual`."""
        assert self.inject is not None
        normed = self.norm(hidden)
        x = normed.to(self.down.weight.dtype)
        observer.rows((self.down.name, self.inject.name), x)
        shares = 2 * torch.sigmoid(self.inject(x, observer).float() / self.norm.n_strands)
        return ResidualStream(self.mixed(normed, observer), hidden, shares)


def load_gated_strands(load: Loader, name: str, norm: StrandNorm, rank: int, hidden: int) -> GatedStrands:
    """Read what mixes strands, whose tensors' names begin with `name`: "blk.3.hc_attn".

    norm  of the strands
    rank  of the gate's matrices
    """
    n_strands = norm.n_strands
    wide = n_strands * hidden

    def projection(part: str, *shape: int) -> Projection:
        return Projection(f"{name}_{part}.weight", load.matrix(f"{name}_{part}.weight", *shape), None)

    has_shares = load.has(f"{name}_inject.weight")
    return GatedStrands(
        norm=norm,
        down=projection("down", rank, wide),
        up=projection("up", wide, rank),
        inject=projection("inject", n_strands, wide) if has_shares else None,
    )


def load_strand_norm(load: Loader, name: str, n_strands: int, hidden: int, eps: float) -> StrandNorm:
    """Read a norm of strands."""
    return StrandNorm(RMSNorm(load.float32(name, n_strands * hidden), eps), n_strands)
