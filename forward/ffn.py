"""A feed-forward block: down(silu(gate(x)) * up(x)). Dense, shared and routed experts all are one."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import linear, silu

from imatrix.accumulate import Accumulator
from forward.load import Loader


@dataclass(frozen=True)
class FeedForward:
    """gate, up (width, hidden_size); down (hidden_size, width)"""

    gate: torch.Tensor
    up: torch.Tensor
    down: torch.Tensor

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        """Return what `down` multiplies, (n_rows, width)."""
        return silu(linear(x, self.gate), inplace=True).mul_(linear(x, self.up))

    def observed(self, x: torch.Tensor, names: tuple[str, str, str], seen: Accumulator) -> torch.Tensor:
        """Return the block's output for `x` in float32; `names` are gate's, up's and down's."""
        gate, up, down = names
        inner = self.inner(x)
        seen.add((gate, up), x)
        seen.add((down,), inner)
        return linear(inner, self.down).float()


def names_of(layer: int, kind: str = "") -> tuple[str, str, str]:
    """Return the names of gate, up and down; `kind` is "", "_shexp" or "_exps"."""
    return (
        f"blk.{layer}.ffn_gate{kind}.weight",
        f"blk.{layer}.ffn_up{kind}.weight",
        f"blk.{layer}.ffn_down{kind}.weight",
    )


def load_ffn(load: Loader, names: tuple[str, str, str], width: int) -> FeedForward:
    """Return the block made of three matrices."""
    gate, up, down = names
    hidden = load.model.config.hidden_size
    return FeedForward(
        load.matrix(gate, width, hidden), load.matrix(up, width, hidden), load.matrix(down, hidden, width)
    )


def load_expert(load: Loader, layer: int, expert: int) -> FeedForward:
    """Return one routed expert of a layer."""
    config = load.model.config
    gate, up, down = names_of(layer, "_exps")
    n_experts, hidden, width = config.n_routed_experts, config.hidden_size, config.moe_intermediate_size
    return FeedForward(
        load.stacked(gate, expert, n_experts, width, hidden),
        load.stacked(up, expert, n_experts, width, hidden),
        load.stacked(down, expert, n_experts, hidden, width),
    )
