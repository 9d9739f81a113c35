"""The layer for multi-token prediction (MTP, "nextn"), which drafts the token after the next one.

It stands behind the model's own layers, and is a layer like them but for its two ends. Its row at position p
is made of two things: the embedding of token p, and the hidden state with which the model predicted that
token, which is the one at p - 1 as the output norm leaves it.

    row p = eh_proj [enorm(embedding of token p), hnorm(output_norm(hidden state at p - 1))]

What comes out of the layer at p, through a norm of its own and an output matrix, predicts token p + 1, as
the model itself does at p. So draft and model are compared at the same place. The first row of a chunk has
zeros in place of a hidden state.

This is DeepSeek V3's layer (arXiv 2412.19437, section 2.2), as llama.cpp runs it for all families that it
drafts with. There, too, the layer has no indexer, and a model has one such layer.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, replace

import torch
from torch.nn.functional import linear, pad

from imatrix.forward.hidden_states import Rows
from imatrix.forward.layer import Layer, refuse_nonfinite
from imatrix.forward.layers.load import Loader
from imatrix.forward.layers.residual import RMSNorm
from imatrix.forward.layers.rope import Rotation
from imatrix.forward.logits import Head
from imatrix.forward.network import EMBEDDINGS, OUTPUT_NORM, End, Network
from imatrix.forward.observe import Observer, watch


def _name(layer: int, part: str) -> str:
    """Name a tensor that an MTP layer has besides those of any layer.

    eh_proj           the projection of a token's embedding and the hidden state before it
    enorm, hnorm      the norms of these two
    embed_tokens, shared_head_norm, shared_head_head  may be missing: then the model's own take their place
    """
    return f"blk.{layer}.nextn.{part}.weight"


@dataclass(frozen=True)
class MTPEntry:
    """Function that makes the rows that an MTP layer begins with.

    load        reads the embeddings of a chunk's tokens, from the tensor `embeddings`
    name        of the projection
    projection  (hidden_size, 2 * hidden_size)
    end         takes the last hidden states to what the model's output matrix multiplies
    """

    load: Loader
    embeddings: str
    name: str
    projection: torch.Tensor
    embedding_norm: RMSNorm
    hidden_norm: RMSNorm
    end: End

    def __call__(self, hidden: torch.Tensor, tokens: torch.Tensor, observer: Observer) -> torch.Tensor:
        """Make one chunk's rows of the last hidden states; what is handed on behind these stays.

        hidden  float32 (n_tokens, state_size); may be differentiated
        tokens  int64 (n_tokens,)
        raises  BadActivation for NaN or infinity
        """
        unique, places = torch.unique(tokens, return_inverse=True)
        rows = self.load.picked_rows(self.embeddings, unique.tolist())[places.to(self.load.device)]
        before = pad(self.end(hidden)[:-1], (0, 0, 1, 0))
        x = torch.cat((self.embedding_norm(rows), self.hidden_norm(before)), -1).to(self.load.dtype)
        observer.rows((self.name,), x)
        states = linear(x, self.projection)
        watch(observer, self.name, x, states)
        refuse_nonfinite(states, self.name)
        return torch.cat((states.float(), hidden[:, states.shape[1] :]), -1)


def with_mtp(network: Network, tensors: Container[str]) -> Network:
    """Give a network its MTP layer, if the model has one, and one only.

    tensors  names of the model's tensors
    """
    first, second = (_name(network.n_layers + number, "eh_proj") for number in range(2))
    if first not in tensors:
        return replace(network, n_stored_mtp=0)
    if not network.builds_mtp or second in tensors:
        return network

    def build(load: Loader, number: int, rotate: Rotation) -> Layer:
        layer = network.build(load, number, rotate)
        return layer if number < network.n_layers else replace(layer, entry=_load_entry(network, load))

    return replace(network, build=build, n_mtp=1)


def _load_entry(network: Network, load: Loader) -> MTPEntry:
    layer, size = network.n_layers, network.hidden_size
    embeddings, projection = _name(layer, "embed_tokens"), _name(layer, "eh_proj")
    table = load.tensor(embeddings if load.has(embeddings) else EMBEDDINGS)
    return MTPEntry(
        load=load,
        embeddings=table.name,
        name=projection,
        projection=load.matrix(projection, size, 2 * size),
        embedding_norm=RMSNorm(load.float32(_name(layer, "enorm"), size), network.norm_eps),
        hidden_norm=RMSNorm(load.float32(_name(layer, "hnorm"), size), network.norm_eps),
        end=network.load_end(load),
    )


@dataclass(frozen=True)
class DraftEnd:
    """The end of the MTP layer, up to the output matrix: a norm of the hidden states alone."""

    norm: RMSNorm

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.norm(hidden[:, : len(self.norm.weight)])


def draft_norm(network: Network, load: Loader) -> RMSNorm:
    """Load the norm behind the MTP layer."""
    named = _name(network.n_layers, "shared_head_norm"), f"blk.{network.n_layers}.layer_output_norm.weight"
    name = next(filter(load.has, named), OUTPUT_NORM)
    return RMSNorm(load.float32(name, network.hidden_size), network.norm_eps)


def draft_head(network: Network, load: Loader, states: Rows) -> Head:
    """Load what makes the draft's logits; `states` are the hidden states after the MTP layer."""
    name = _name(network.n_layers, "shared_head_head")
    matrix = name if load.has(name) else network.output
    return Head(load, states, DraftEnd(draft_norm(network, load)), matrix, network.logits)


def own_embeddings(network: Network, load: Loader) -> tuple[str, torch.Tensor] | None:
    """Name the table of embeddings that the MTP layer has of its own; None where it takes the model's.

    No matrix multiplies anything by a table. What is told beside it is what the norm multiplies its columns
    by, and with them their errors: float32 (hidden_size,).
    """
    name = _name(network.n_layers, "embed_tokens")
    if not load.has(name):
        return None
    return name, load.float32(_name(network.n_layers, "enorm"), network.hidden_size)
