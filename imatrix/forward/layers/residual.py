"""Residual around a part of a layer: a norm before it, and hidden states that its output joins.

In most models the part sees the hidden states, and its output is added to them. Others carry several strands
of hidden states side by side, and mix them on the way in and out; see
`hyper_connections.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from imatrix.forward.observe import Observer


@dataclass(frozen=True)
class RMSNorm:
    """A norm with its weight, float32 (n_cols,).

    bias  float32 (n_cols,): what is added in the end; None for nothing
    """

    weight: torch.Tensor
    eps: float
    bias: torch.Tensor | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Scale the rows of `x` to a mean square of one and by the weight; computed in float32."""
        scaled = unit_rows(x, self.eps).mul_(self.weight)
        return scaled if self.bias is None else scaled.add_(self.bias)


@dataclass(frozen=True)
class CentredNorm(RMSNorm):
    """The same of rows less their mean: a LayerNorm."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Take each row's mean from it, then scale as an RMSNorm does; computed in float32."""
        x = x.float()
        return super().__call__(x - x.mean(-1, keepdim=True))


class Unnormed:
    """In place of a norm that a model hasn't got: its parts see the hidden states themselves."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x.float()


UNNORMED = Unnormed()

Norm = RMSNorm | Unnormed
"""Kinds of norms that the input of a part goes through."""


def unit_rows(x: torch.Tensor, eps: float) -> torch.Tensor:
    """Scale the rows of `x` to a mean square of one, float32."""
    x = x.float()
    # What a differentiated pass keeps of the first two is their results, so those are not overwritten.
    mean_square = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square().div_(x.shape[-1])
    return x * mean_square.add_(eps).rsqrt_()


@dataclass(frozen=True)
class ResidualStream:
    """A chunk's hidden states while a part of the layer is at work.

    x       float32 (n_tokens, hidden_size): what the part sees, before its norm
    rest    float32 (n_tokens, n_strands * hidden_size): the hidden states without the part's output
    shares  float32 (n_tokens, n_strands): what the output is multiplied by before it is added to each strand;
            None for one strand, which it is added to as it is
    n_shown  columns of x, of rest and of the output behind those: numbers beside the hidden states, and what
             changes there
    """

    x: torch.Tensor
    rest: torch.Tensor
    shares: torch.Tensor | None = None
    n_shown: int = 0

    def joined(self, output: torch.Tensor) -> torch.Tensor:
        """Add the part's output, (n_tokens, hidden_size), to the hidden states; the output is used up."""
        if not self.n_shown:
            return joined(self.rest, output, self.shares)
        own, change = output.tensor_split((-self.n_shown,), -1)
        hidden, handed = joined(self.rest, own, self.shares).tensor_split((-self.n_shown,), -1)
        return torch.cat((hidden, handed + change), -1)

    def spread(self, weights: torch.Tensor) -> torch.Tensor:
        """Multiply the weights of some outputs by the shares of every strand.

        weights  (n_tokens, n_outputs): what each is multiplied by as a part of the whole output
        returns  (n_tokens, n_outputs, n_strands); `weights` themselves for one strand
        """
        return weights if self.shares is None else weights[:, :, None] * self.shares[:, None]


def joined(rest: torch.Tensor, output: torch.Tensor, shares: torch.Tensor | None) -> torch.Tensor:
    """Add a part's output to hidden states; see `ResidualStream`. The output is used up.

    Columns behind those of the output stay as they are.
    """
    if shares is not None:
        output = (shares[:, :, None] * output[:, None]).flatten(1)
    n_cols = output.shape[1]
    if n_cols < rest.shape[1]:
        return torch.cat((output.add_(rest[:, :n_cols]), rest[:, n_cols:]), -1)
    return output.add_(rest)


class Residual(Protocol):
    """How hidden states go past a part of a layer."""

    def enter(self, hidden: torch.Tensor, observer: Observer) -> ResidualStream:
        """Split one chunk's hidden states into the part's input and the rest.

        hidden  (n_tokens, n_strands * hidden_size)
        """


class Plain:
    """One strand: the part sees it, and its output is added."""

    def enter(self, hidden: torch.Tensor, observer: Observer) -> ResidualStream:
        return ResidualStream(hidden, hidden)


PLAIN = Plain()
"""The residual of most models."""


@dataclass(frozen=True)
class Scaled:
    """One strand, to which the part's output is added times `factor`."""

    factor: float

    def enter(self, hidden: torch.Tensor, observer: Observer) -> ResidualStream:
        return ResidualStream(hidden, hidden, hidden.new_full((len(hidden), 1), self.factor))


@dataclass(frozen=True)
class Normed:
    """One strand that is normed before the part sees it and adds to it: the norm behind the part before.

    added  float32 (n_positions, n_cols): what is added before the norm, by position; one row for all. None
           for nothing
    """

    norm: Norm
    added: torch.Tensor | None = None

    def enter(self, hidden: torch.Tensor, observer: Observer) -> ResidualStream:
        x = self.norm(hidden if self.added is None else hidden + self.added[: len(hidden)])
        return ResidualStream(x, x)


@dataclass(frozen=True)
class WithSidecar:
    """Strands of `n_cols` columns together, behind them numbers that layers hand on.

    GLM-5.2 has layers that attend to the positions that a layer before them has chosen. Their numbers stand
    beside the hidden states, so they go wherever those go: into files, to other processes, backwards. They
    are exact in float32 up to 2**24.

    strands  how the strands go past the part
    shows    whether the part sees the numbers, too, behind its input, and returns their change
    """

    n_cols: int
    strands: Residual = PLAIN
    shows: bool = False

    def enter(self, hidden: torch.Tensor, observer: Observer) -> ResidualStream:
        """Split one chunk's columns, (n_tokens, n_cols + n_handed)."""
        own, handed = hidden.tensor_split((self.n_cols,), -1)
        stream = self.strands.enter(own, observer)
        rest = torch.cat((stream.rest, handed), -1)
        if not self.shows:
            return ResidualStream(stream.x, rest, stream.shares)
        return ResidualStream(torch.cat((stream.x, handed), -1), rest, stream.shares, handed.shape[1])
