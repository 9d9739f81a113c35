"""What goes around a part of a layer: hidden states on their way past it, and what comes out joins them.

In most models the part sees the hidden states, and its output is added to them. Others carry several strands
of hidden states side by side, and mix them on the way in and out (forward/layers/hyper_connections.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from forward.observe import Observer


@dataclass(frozen=True)
class ResidualStream:
    """A chunk's hidden states while a part of the layer is at work.

    x       float32 (n_tokens, hidden_size): what the part sees, before its norm
    rest    float32 (n_tokens, n_strands * hidden_size): the hidden states without the part's output
    shares  float32 (n_tokens, n_strands): what the output is multiplied by before it is added to each strand;
            None for one strand, which it is added to as it is
    """

    x: torch.Tensor
    rest: torch.Tensor
    shares: torch.Tensor | None = None

    def joined(self, output: torch.Tensor) -> torch.Tensor:
        """Return the hidden states with the part's output, (n_tokens, hidden_size), which is used up."""
        return joined(self.rest, output, self.shares)

    def spread(self, weights: torch.Tensor) -> torch.Tensor:
        """Return by what each of some outputs is multiplied for every strand.

        weights  (n_tokens, n_outputs): what each is multiplied by as a part of the whole output
        returns  (n_tokens, n_outputs, n_strands); `weights` themselves for one strand
        """
        return weights if self.shares is None else weights[:, :, None] * self.shares[:, None]


def joined(rest: torch.Tensor, output: torch.Tensor, shares: torch.Tensor | None) -> torch.Tensor:
    """Return hidden states with a part's output; see `ResidualStream`. The output is used up.

    Columns behind those of the output stay as they are.
    """
    if shares is None:
        n_cols = output.shape[1]
        if n_cols < rest.shape[1]:
            return torch.cat((output.add_(rest[:, :n_cols]), rest[:, n_cols:]), -1)
        return output.add_(rest)
    return rest + (shares[:, :, None] * output[:, None]).flatten(1)


class Residual(Protocol):
    """How hidden states go past a part of a layer."""

    def enter(self, hidden: torch.Tensor, observer: Observer) -> ResidualStream:
        """Return the way past the part of one chunk's hidden states, (n_tokens, n_strands * hidden_size)."""
        ...


class Plain:
    """One strand: the part sees it, and its output is added."""

    def enter(self, hidden: torch.Tensor, observer: Observer) -> ResidualStream:
        return ResidualStream(hidden, hidden)


PLAIN = Plain()
"""The residual of most models."""


@dataclass(frozen=True)
class WithSidecar:
    """One strand of `n_cols` columns, behind it numbers that layers hand on; the part sees the strand alone.

    GLM-5.2 has layers that attend to the positions that a layer before them has chosen. Their numbers stand
    beside the hidden states, so they go wherever those go: into files, to other processes, backwards. They
    are exact in float32 up to 2**24.
    """

    n_cols: int

    def enter(self, hidden: torch.Tensor, observer: Observer) -> ResidualStream:
        """Return the way past the part of one chunk's columns, (n_tokens, n_cols + n_handed)."""
        return ResidualStream(hidden[:, : self.n_cols], hidden)
