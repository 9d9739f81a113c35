"""The original's pass through the text, which the runs of several types share.

They go from layer to layer in step. The run that comes to a layer first computes the original there. The
others find the hidden states after it, and what its matrices multiply, as far as that was kept. What was not
is computed again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

import torch

from imatrix.calibrate.run.kept import Kept
from imatrix.forward.sweep import Routes


@dataclass(frozen=True)
class Way:
    """How a model's tokens go past the block of a layer.

    routes  where they go; None for a layer without routed experts
    shares  see `imatrix.forward.layers.residual.ResidualStream`, on the CPU
    """

    routes: Routes | None
    shares: torch.Tensor | None

    @classmethod
    def joined(cls, ways: Sequence[Self]) -> Self:
        routes = [way.routes for way in ways if way.routes is not None]
        shares = [way.shares for way in ways if way.shares is not None]
        return cls(Routes.joined(routes) if routes else None, torch.cat(shares) if shares else None)


@dataclass
class OriginalPass:
    """How far the original has come.

    kept       what its matrices multiply in the layer
    is_shared  whether others need it, too
    layer      the number of the layer; None before the first
    way        past its block; None until the attention is computed
    has_block, has_experts  whether their outputs are in the hidden states after the layer
    """

    kept: Kept
    is_shared: bool = False
    layer: int | None = None
    way: Way | None = None
    has_block: bool = False
    has_experts: bool = False

    def enter(self, layer: int, restore: Callable[[], object]) -> None:
        """Come to a layer.

        restore  puts the hidden states before it where layers find them; called unless they are there
        """
        if self.layer == layer:
            return
        if self.layer != layer - 1:
            restore()
        self.kept.clear()
        self.layer, self.way, self.has_block, self.has_experts = layer, None, False, False
