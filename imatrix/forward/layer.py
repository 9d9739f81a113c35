"""One layer with its weights, and what it does to a chunk of hidden states before its routed experts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import torch

from gguf_tools.errors import BadActivation
from imatrix.forward.layers.experts import Experts
from imatrix.forward.layers.ffn import FeedForward, through
from imatrix.forward.layers.residual import PLAIN, Norm, Residual, ResidualStream, RMSNorm
from imatrix.forward.observe import Observer


class LayerEntry(Protocol):
    """Function that makes a layer's rows of the hidden states before it, where these alone are not enough."""

    def __call__(self, hidden: torch.Tensor, tokens: torch.Tensor, observer: Observer, /) -> torch.Tensor:
        """Make the rows of one chunk, which has these tokens, int64 (n_tokens,)."""


class Attention(Protocol):
    """The attention of one layer, with its norm."""

    def __call__(self, hidden: torch.Tensor, observer: Observer) -> torch.Tensor:
        """Attend within one chunk; return float32 (n_tokens, hidden_size)."""

    def work(self, n_tokens: int) -> int:
        """Estimate the multiplications per token of a chunk of `n_tokens`."""


class NoAttention:
    """In place of attention in a layer that has none."""

    def __call__(self, hidden: torch.Tensor, observer: Observer) -> torch.Tensor:
        return torch.zeros_like(hidden)

    def work(self, n_tokens: int) -> int:
        return 0


@dataclass(frozen=True)
class SideBySide:
    """Two kinds of attention that see the same, and whose outputs are added."""

    first: Attention
    second: Attention

    def __call__(self, hidden: torch.Tensor, observer: Observer) -> torch.Tensor:
        return self.first(hidden, observer) + self.second(hidden, observer)

    def work(self, n_tokens: int) -> int:
        return self.first.work(n_tokens) + self.second.work(n_tokens)


@dataclass(frozen=True)
class Layer:
    """One layer with its weights; those of routed experts are read when it is their turn.

    name               "blk.3", the beginning of its tensors' names
    norm               of what the block and the experts multiply
    block              what every token goes through: a dense block, or shared experts; None where there is
                       neither
    experts            routed experts, None where the layer is dense
    around_attention   how hidden states go past the attention
    around_block       how they go past block and experts together
    attention_end      what the last tensor of the attention is called in the layer
    router_norm        of what the router multiplies; None where that is what the experts multiply
    entry              makes the rows that the layer begins with; None: those are the hidden states before it
    is_parallel        whether block and experts see what the attention sees, not what it has been added to
    """

    name: str
    attention: Attention
    norm: Norm
    block: FeedForward | None
    experts: Experts | None
    around_attention: Residual = PLAIN
    around_block: Residual = PLAIN
    attention_end: str = "attn_output.weight"
    router_norm: RMSNorm | None = None
    entry: LayerEntry | None = None
    is_parallel: bool = False

    def enter(self, hidden: torch.Tensor, tokens: torch.Tensor, observer: Observer) -> torch.Tensor:
        """Return the rows that the layer begins with, as wide as `hidden`.

        hidden  one chunk's hidden states before the layer
        tokens  the chunk's, int64 (n_tokens,)
        """
        return hidden if self.entry is None else self.entry(hidden, tokens, observer)

    def attention_block(self, hidden: torch.Tensor, observer: Observer) -> ResidualStream:
        """Take one chunk's hidden states through the attention, up to the block.

        hidden  float32 (n_tokens, n_strands * hidden_size); may be differentiated
        raises  BadActivation naming layer and tensor for NaN or infinity
        """
        stream = self.around_attention.enter(hidden, observer)
        hidden = stream.joined(self.attention(stream.x, observer))
        refuse_nonfinite(hidden, f"{self.name}.{self.attention_end}")
        passage = self.around_block.enter(hidden, observer)
        return replace(passage, x=stream.x) if self.is_parallel else passage

    def chosen_by(self, tokens: torch.Tensor | None) -> torch.Tensor | None:
        """Return the experts that these tokens go to whatever their hidden states, (n_tokens, n_used).

        None where hidden states decide.
        """
        return None if self.experts is None else self.experts.router.chosen_by(tokens)

    def forward(
        self, hidden: torch.Tensor, dtype: torch.dtype, observer: Observer, chosen: torch.Tensor | None = None
    ) -> Passed:
        """Apply the layer to one chunk, leaving out its routed experts.

        hidden  float32 (n_tokens, n_strands * hidden_size); may be differentiated
        dtype   the type that matrices are multiplied in
        chosen  experts that have been chosen before; None: the router chooses
        raises  BadActivation naming layer and tensor for NaN or infinity
        """
        stream = self.attention_block(hidden, observer)
        x, hidden = self.norm(stream.x), stream.rest
        weights = None
        if self.experts is not None:
            chosen, weights = self.route(stream, x, observer, chosen)
        x = x.to(dtype)
        if self.block is not None:
            hidden = stream.joined(through(self.block, x, observer))
            refuse_nonfinite(hidden, self.block.names.down)
        if self.experts is not None and self.experts.latent is not None:
            x = self.experts.latent.enter(x, observer)
        return Passed(hidden, x, chosen, weights)

    def route(
        self, stream: ResidualStream, x: torch.Tensor, observer: Observer, chosen: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return where a chunk's tokens go, experts and weights as in `Passed`.

        x  the normed input of block and experts, float32 (n_tokens, hidden_size)
        """
        assert self.experts is not None
        assert stream.shares is None or self.experts.latent is None, "latent experts add to one strand"
        router = self.experts.router
        seen = x if self.router_norm is None else self.router_norm(stream.x)
        observer.rows((router.name,), seen)
        chosen, weights = router(seen, chosen)
        return chosen, stream.spread(weights)


@dataclass(frozen=True)
class Passed:
    """Results of a layer for a chunk, before its routed experts.

    hidden   float32 (n_tokens, n_strands * hidden_size): the sum so far
    x        (n_tokens, n_cols): what the routed experts multiply
    chosen   experts, (n_tokens, n_used); None for a layer without routed experts
    weights  what their outputs are multiplied by, of the same shape; with several strands that for each,
             (n_tokens, n_used, n_strands)
    """

    hidden: torch.Tensor
    x: torch.Tensor
    chosen: torch.Tensor | None
    weights: torch.Tensor | None


def refuse_nonfinite(states: torch.Tensor, name: str, which: str = "hidden states after it") -> None:
    """Raise BadActivation naming the tensor that the hidden states, or other states of tokens, come from."""
    # A sum has NaN or infinity when a state has, and takes one pass.
    if not bool(torch.isfinite(states.sum())):
        raise BadActivation(f"{name}: the {which} have NaN or infinity")
