"""The indexer of GLM-5 Next: which pools of earlier positions each token attends to.

Queries, keys and scores are those of GLM-5's indexer (indexer.py), without a rotation. A pool's key is a
weighted mean of its positions' keys: the weights are, column by column, a softmax of what a gate makes of the
positions, and of their places in the pool. A token attends to the best of the pools that have ended, and to
the positions behind them. While all pools fit, all are attended to, and nothing is computed.

The choice has no gradient, so a differentiated pass shows observers none for these matrices.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import layer_norm, linear

from imatrix.forward.layers.attention import QUERY_BLOCK
from imatrix.forward.layers.attention.compressed import not_counting
from imatrix.forward.layers.attention.indexer import KEY_NORM_EPS, indexer_names
from imatrix.forward.layers.load import Loader


@dataclass(frozen=True)
class PoolSizes:
    """Sizes of a PoolIndexer.

    n_cols    of a head
    length    positions of a pool
    n_chosen  pools that a token attends to
    hidden    columns of the hidden states
    q_lora    columns of the compressed query
    """

    n_heads: int
    n_cols: int
    length: int
    n_chosen: int
    hidden: int
    q_lora: int

    @property
    def n_positions(self) -> int:
        """Positions in a choice: those of the pools, and those behind the last pool that has ended."""
        return (self.n_chosen + 1) * self.length - 1


@dataclass(frozen=True)
class PoolIndexer:
    """The indexer of one layer.

    names     of the matrices that multiply hidden states, and of those that multiply compressed queries
    queries   (n_heads * n_cols, q_lora)
    keys      (n_cols, hidden_size)
    weight, bias  of the keys' norm, (n_cols,)
    shares    float32 (n_heads, hidden_size): what makes the weights of heads
    gate      float32 (n_cols, hidden_size)
    places    float32 (length, n_cols), added to what the gate makes
    """

    names: tuple[tuple[str, ...], tuple[str, ...]]
    sizes: PoolSizes
    queries: torch.Tensor
    keys: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor
    shares: torch.Tensor
    gate: torch.Tensor
    places: torch.Tensor

    @torch.no_grad()
    def choice(self, x: torch.Tensor, compressed: torch.Tensor) -> torch.Tensor | None:
        """Choose the positions that each token of a chunk attends to; see `Indexer.choice`."""
        n_tokens, sizes, length = len(x), self.sizes, self.sizes.length
        n_pools = n_tokens // length
        if n_pools <= sizes.n_chosen:
            return None
        key = self._pooled(x[: n_pools * length])
        query = linear(compressed, self.queries).float().unflatten(-1, (sizes.n_heads, -1))
        shares = linear(x.float(), self.shares)
        best = []
        for start in range(0, n_tokens, QUERY_BLOCK):
            stop = min(n_tokens, start + QUERY_BLOCK)
            scores = (torch.relu(query[start:stop] @ key.T) * shares[start:stop, :, None]).sum(1)
            early = not_counting(start, stop, n_pools, length, x.device)
            best.append(scores.masked_fill_(early, float("-inf")).topk(sizes.n_chosen, -1).indices)
        within = torch.arange(length, device=x.device)
        chosen = (torch.cat(best)[..., None] * length + within).flatten(1)
        ended = torch.arange(1, n_tokens + 1, device=x.device) // length * length
        behind = ended[:, None] + within[:-1]
        # A position behind the chunk stands for one that is chosen anyway.
        return torch.cat((chosen, torch.where(behind < n_tokens, behind, chosen[:, :1])), -1)

    def _pooled(self, x: torch.Tensor) -> torch.Tensor:
        """Return the keys of whole pools, float32 (n_pools, n_cols); `x` are the hidden states in them."""
        cols, length = (self.sizes.n_cols,), self.sizes.length
        key = layer_norm(linear(x, self.keys).float(), cols, self.weight, self.bias, KEY_NORM_EPS)
        gate = linear(x.float(), self.gate).unflatten(0, (-1, length)) + self.places
        return (key.unflatten(0, (-1, length)) * torch.softmax(gate, 1)).sum(1)


def pool_indexer_names(layer: int) -> list[str]:
    """Return the names of the tensors that the indexer of a layer has."""
    compressor = (f"blk.{layer}.indexer_compressor_{part}.weight" for part in ("gate", "ape"))
    return [*indexer_names(layer), *compressor]


def load_pool_indexer(load: Loader, layer: int, sizes: PoolSizes) -> PoolIndexer:
    """Read the indexer of a layer."""
    queries, keys, weight, bias, shares, gate, places = pool_indexer_names(layer)
    return PoolIndexer(
        names=((keys, shares, gate), (queries,)),
        sizes=sizes,
        queries=load.matrix(queries, sizes.n_heads * sizes.n_cols, sizes.q_lora),
        keys=load.matrix(keys, sizes.n_cols, sizes.hidden),
        weight=load.float32(weight, sizes.n_cols),
        bias=load.float32(bias, sizes.n_cols),
        shares=load.float32(shares, sizes.n_heads, sizes.hidden),
        gate=load.float32(gate, sizes.n_cols, sizes.hidden),
        places=load.float32(places, sizes.length, sizes.n_cols),
    )
