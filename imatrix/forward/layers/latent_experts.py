"""Latent experts: routed experts that work in fewer columns than hidden states have.

One matrix takes what experts see to their columns, once for all experts of a token. There the outputs of
experts are added up, and once all of them are there, another matrix takes the sum back, in some models behind
a norm. Router and shared experts see all columns.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from imatrix.forward.layers.attention.shared_keys import Projection
from imatrix.forward.layers.load import Loader
from imatrix.forward.layers.residual import RMSNorm
from imatrix.forward.observe import Observer


@dataclass(frozen=True)
class LatentColumns:
    """The way of a layer to the columns of its routed experts, and back.

    down  (n_cols, hidden_size)
    norm  of the sum; None for none
    up    (hidden_size, n_cols)
    """

    down: Projection
    norm: RMSNorm | None
    up: Projection

    @property
    def n_cols(self) -> int:
        return len(self.down.weight)

    def enter(self, x: torch.Tensor, observer: Observer) -> torch.Tensor:
        """Return the inputs of experts, (n_tokens, n_cols), for `x`, (n_tokens, hidden_size)."""
        observer.rows((self.down.name,), x)
        return self.down(x, observer)

    def before_up(self, summed: torch.Tensor) -> torch.Tensor:
        """Return the input of `up` for the sum of outputs of experts, (n_tokens, n_cols) both."""
        x = summed if self.norm is None else self.norm(summed)
        return x.to(self.up.weight.dtype)

    def leave(self, summed: torch.Tensor, observer: Observer) -> torch.Tensor:
        """Return the change of hidden states by the experts, float32 (n_tokens, hidden_size)."""
        x = self.before_up(summed)
        observer.rows((self.up.name,), x)
        return self.up(x, observer).float()


def load_latent_columns(
    load: Loader, layer: int, kind: str, hidden_size: int, n_cols: int, eps: float
) -> LatentColumns:
    """Read a layer's matrices, which files call "ffn_" and `kind`, and its norm if there is one."""

    def name(part: str) -> str:
        return f"blk.{layer}.ffn_{kind}_{part}.weight"

    def projection(part: str, *shape: int) -> Projection:
        return Projection(name(part), load.matrix(name(part), *shape), None)

    norm = name("norm")
    return LatentColumns(
        projection("down", n_cols, hidden_size),
        RMSNorm(load.float32(norm, n_cols), eps) if load.has(norm) else None,
        projection("up", hidden_size, n_cols),
    )
