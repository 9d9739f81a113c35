"""Parts of a Gemma 4's layer besides attention, and what goes around them: several strands, more than a sum.

In the 26B, a dense block stands beside routed experts. A layer adds norm(norm_1(block's output) + norm_2(sum
of the experts' outputs)), and multiplies all by a factor. Experts are added up one by one, so the norm of
their sum comes when all are done. A layer leaves three strands, and whoever reads them, the next layer or the
model's end, puts them together:

    the experts' sum | hidden states after the attention | the block's output, normed

In the small models, a layer adds an embedding of its own behind the dense block, made of the token's
embedding and of its id. Both stand beside the hidden states.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import gelu, linear

from imatrix.forward.layers.attention.shared_keys import Projection, load_projection
from imatrix.forward.layers.ffn import FeedForward, through
from imatrix.forward.layers.load import Loader
from imatrix.forward.layers.residual import ResidualStream, RMSNorm
from imatrix.forward.observe import Observer

N_STRANDS = 3
"""Strands of a model with experts."""


@dataclass(frozen=True)
class StrandSum:
    """Rule that puts the strands of a layer with experts together.

    experts_norm  of the experts' sum
    norm          of what the layer adds
    scale         what the hidden states are multiplied by, float32 (1,)
    """

    experts_norm: RMSNorm
    norm: RMSNorm
    scale: torch.Tensor

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        """Return hidden states, float32 (n_tokens, hidden_size), for their three strands."""
        experts, before, block = states.chunk(N_STRANDS, -1)
        return (before + self.norm(block + self.experts_norm(experts))) * self.scale


@dataclass(frozen=True)
class StrandEntry:
    """Residual around attention; `together` is that of the layer before, None for the first layer."""

    together: StrandSum | None

    def enter(self, hidden: torch.Tensor, observer: Observer) -> ResidualStream:
        """Put the strands together; those of embeddings are all the same."""
        whole = hidden.chunk(N_STRANDS, -1)[0] if self.together is None else self.together(hidden)
        return ResidualStream(whole, whole)


@dataclass(frozen=True)
class DenseBesideExperts:
    """Residual around the experts: the dense block, whose output has a norm, and the norm before it."""

    norm: RMSNorm
    block: FeedForward

    def enter(self, hidden: torch.Tensor, observer: Observer) -> ResidualStream:
        """Compute the block, and leave room for the experts' sum."""
        output = through(self.block, self.norm(hidden).to(self.block.down.dtype), observer)
        return ResidualStream(hidden, torch.cat((torch.zeros_like(hidden), hidden, output), -1))


@dataclass(frozen=True)
class LayerEmbedding:
    """The embedding that a layer adds.

    load   reads the tables
    table  name of that of tokens, (vocab_size, n_layers * n_cols)
    model  what makes a part of the embedding of a token's own, (n_cols, hidden_size)
    norm   of that part
    gate   makes the gate of hidden states, (n_cols, hidden_size)
    output of the gated embedding, (hidden_size, n_cols)
    end    norm of what is added
    first  the first of the layer's columns in the table
    """

    load: Loader
    table: str
    model: torch.Tensor
    norm: RMSNorm
    gate: Projection
    output: Projection
    end: RMSNorm
    first: int

    def __call__(self, hidden: torch.Tensor, beside: torch.Tensor, observer: Observer) -> torch.Tensor:
        """Return the rows that are to be added, float32 (n_tokens, hidden_size).

        beside  what stands beside the hidden states: embeddings, ids of tokens, and more
        """
        n_hidden, dtype = hidden.shape[1], self.model.dtype
        embeddings, ids = beside[:, :n_hidden], beside[:, n_hidden].long()
        product = linear(embeddings.to(dtype), self.model).float() * n_hidden**-0.5
        added = (self.norm(product) + self._of_tokens(ids)) * 0.5**0.5
        x = hidden.to(dtype)
        observer.rows((self.gate.name,), x)
        gated = gelu(self.gate(x, observer), approximate="tanh") * added.to(dtype)
        observer.rows((self.output.name,), gated)
        return self.end(self.output(gated, observer).float())

    def _of_tokens(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the layer's columns of the rows of tokens, scaled, float32 (n_tokens, n_cols)."""
        unique, places = torch.unique(ids, return_inverse=True)
        n_cols = self.model.shape[0]
        rows = self.load.picked_rows(self.table, unique.tolist())[:, self.first : self.first + n_cols]
        return rows[places] * n_cols**0.5


_TOKEN_TABLE, _MODEL_PROJECTION = "per_layer_token_embd.weight", "per_layer_model_proj.weight"


def load_layer_embedding(
    load: Loader, layer: int, table: tuple[int, int], hidden: int, n_cols: int, eps: float
) -> LayerEmbedding:
    """Read the embedding of `n_cols` columns that a layer adds.

    table  shape of the tokens' table, (vocab_size, n_layers * n_cols)
    eps    of norms
    """
    name, first = f"blk.{layer}", layer * n_cols
    load.shaped(_TOKEN_TABLE, *table)
    model = load.shaped(_MODEL_PROJECTION, table[1], hidden)
    return LayerEmbedding(
        load=load,
        table=_TOKEN_TABLE,
        model=load.weight(model, first, first + n_cols),
        norm=RMSNorm(load.float32("per_layer_proj_norm.weight", n_cols), eps),
        gate=load_projection(load, f"{name}.inp_gate.weight", n_cols, hidden),
        output=load_projection(load, f"{name}.proj.weight", hidden, n_cols),
        end=RMSNorm(load.float32(f"{name}.post_norm.weight", hidden), eps),
        first=first,
    )


@dataclass(frozen=True)
class DenseBlock:
    """Second half of a layer: norm, block, embedding and factor; nothing goes past it.

    added  None in models without such embeddings
    scale  what the hidden states are multiplied by, float32 (1,)
    """

    norm: RMSNorm
    block: FeedForward
    added: LayerEmbedding | None
    scale: torch.Tensor

    def enter(self, hidden: torch.Tensor, observer: Observer) -> ResidualStream:
        """Compute all of it; what stands beside the hidden states stays as it is."""
        n_cols = self.norm.weight.numel()
        whole, beside = hidden[:, :n_cols], hidden[:, n_cols:]
        whole = whole + through(self.block, self.norm(whole).to(self.block.down.dtype), observer)
        if self.added is not None:
            whole = whole + self.added(whole, beside, observer)
        whole = whole * self.scale
        return ResidualStream(whole, torch.cat((whole, beside), -1) if beside.shape[1] else whole)
