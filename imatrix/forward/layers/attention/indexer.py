"""The indexer of DeepSeek V3.2 and GLM-5: which earlier positions each token attends to.

Its queries are made of the compressed query, its keys, one for all heads, of the hidden state. A position's
score is what heads w_h * relu(query_h . key) add up to, with weights w of the hidden state; positive factors
that the models' code multiplies them by don't change the order. The best `n_chosen` positions up to a token's
own are chosen. While there are no more than that, all are, and nothing is computed.

Published code multiplies queries and keys by a Hadamard matrix, which leaves their products as they are, and
rounds them to FP8. llama.cpp multiplies, too, and keeps keys in F16. Where positions score nearly alike, this
decides which of them is chosen. It is done where caches are to be llama.cpp's (`half_cache`).

In GLM-5.2 most layers have no indexer, and attend to what the last layer before them that has one has chosen.

The choice has no gradient, so a differentiated pass shows observers none for these matrices.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import layer_norm, linear

from imatrix.forward.layers.attention import QUERY_BLOCK
from imatrix.forward.layers.llama_rounding import round_f16
from imatrix.forward.layers.load import Loader
from imatrix.forward.layers.rope import Rotation

KEY_NORM_EPS = 1e-6
"""Epsilon of the keys' layer norm, whatever rms_norm_eps is."""


@dataclass(frozen=True)
class IndexerSizes:
    """Sizes of an indexer.

    n_cols    of a head
    rotated   columns of a head that are rotated, the first ones
    halves    whether column i is rotated with column i + rotated / 2, not with its neighbour
    n_chosen  positions that a token attends to
    hidden    columns of the hidden states
    q_lora    columns of the compressed query
    """

    n_heads: int
    n_cols: int
    rotated: int
    halves: bool
    n_chosen: int
    hidden: int
    q_lora: int


@dataclass(frozen=True)
class Indexer:
    """The indexer of one layer.

    queries   (n_heads * n_cols, q_lora)
    keys      (n_cols, hidden_size)
    weight, bias  of the keys' norm, (n_cols,)
    shares    (n_heads, hidden_size): what makes the weights of heads
    turn      Hadamard matrix for some columns of a head; None: keys are neither turned nor rounded
    names     of the matrices that multiply hidden states, and of those that multiply compressed queries
    """

    names: tuple[tuple[str, ...], tuple[str, ...]]
    sizes: IndexerSizes
    rotate: Rotation
    queries: torch.Tensor
    keys: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor
    shares: torch.Tensor
    turn: torch.Tensor | None = None

    @torch.no_grad()
    def choice(self, x: torch.Tensor, compressed: torch.Tensor) -> torch.Tensor | None:
        """Choose the positions that each token of a chunk attends to, int64 (n_tokens, n_chosen).

        A position may stand there twice, and some may come after the token's own. None: every token attends
        to all up to its own.
        x           the normed hidden states, (n_tokens, hidden_size)
        compressed  the normed compressed queries, (n_tokens, q_lora)
        """
        n_tokens, sizes = len(x), self.sizes
        if n_tokens <= sizes.n_chosen:
            return None
        query = self._rotated(linear(compressed, self.queries).unflatten(-1, (sizes.n_heads, -1)))
        key = layer_norm(linear(x, self.keys).float(), (sizes.n_cols,), self.weight, self.bias, KEY_NORM_EPS)
        key = self._rotated(key[:, None])[:, 0]
        if self.turn is not None:
            query, key = self._turned(query, self.turn), round_f16(self._turned(key, self.turn))
        shares = linear(x.float(), self.shares)
        # A token that has fewer positions to choose from than others attends to the first one in any case.
        choice = torch.zeros((n_tokens, sizes.n_chosen), dtype=torch.int64, device=x.device)
        for start in range(0, n_tokens, QUERY_BLOCK):
            stop = min(n_tokens, start + QUERY_BLOCK)
            scores = torch.full((stop - start, stop), float("-inf"), device=x.device).triu_(start + 1)
            for head in range(sizes.n_heads):
                product = torch.relu(query[start:stop, head] @ key[:stop].T)
                scores += product * shares[start:stop, head, None]
            n_chosen = min(sizes.n_chosen, stop)
            choice[start:stop, :n_chosen] = scores.topk(n_chosen, -1).indices
        return choice

    def _rotated(self, x: torch.Tensor) -> torch.Tensor:
        """Return queries or keys, (n_tokens, n_heads, n_cols), rotated; float32.

        Rotated halves stay side by side: products of queries and keys are the same in any order of columns.
        """
        turned, rest = x.float().split((self.sizes.rotated, self.sizes.n_cols - self.sizes.rotated), -1)
        if self.sizes.halves:
            turned = turned.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)
        return torch.cat((self.rotate(turned), rest), -1)

    def _turned(self, x: torch.Tensor, turn: torch.Tensor) -> torch.Tensor:
        """Return rotated queries or keys, (..., n_cols), with columns in the model's order, turned."""
        if self.sizes.halves:
            rotated, rest = x.split((self.sizes.rotated, self.sizes.n_cols - self.sizes.rotated), -1)
            x = torch.cat((rotated.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2), rest), -1)
        return (x.unflatten(-1, (-1, len(turn))) @ turn).flatten(-2)


def all_but(choice: torch.Tensor) -> torch.Tensor:
    """Mark the positions that each token does not attend to, bool (n_tokens, n_tokens).

    choice  see `Indexer.choice`; positions after a token's own count as either
    """
    n_tokens = len(choice)
    others = torch.ones((n_tokens, n_tokens), dtype=torch.bool, device=choice.device)
    return others.scatter_(1, choice, False)


def hadamard(n_cols: int) -> torch.Tensor:
    """Return the orthogonal Hadamard matrix, (n, n), of the largest power of two that divides `n_cols`."""
    turn = torch.ones((1, 1))
    while n_cols % (2 * len(turn)) == 0:
        turn = torch.cat((torch.cat((turn, turn), 1), torch.cat((turn, -turn), 1)))
    return turn / len(turn) ** 0.5


def indexer_names(layer: int) -> list[str]:
    """Return the names of the tensors that the indexer of a layer has."""
    parts = ("attn_q_b.weight", "attn_k.weight", "k_norm.weight", "k_norm.bias", "proj.weight")
    return [f"blk.{layer}.indexer.{part}" for part in parts]


def load_indexer(load: Loader, layer: int, sizes: IndexerSizes, rotate: Rotation) -> Indexer:
    """Read the indexer of a layer."""
    queries, keys, weight, bias, shares = indexer_names(layer)
    return Indexer(
        names=((keys, shares), (queries,)),
        sizes=sizes,
        rotate=rotate,
        queries=load.matrix(queries, sizes.n_heads * sizes.n_cols, sizes.q_lora),
        keys=load.matrix(keys, sizes.n_cols, sizes.hidden),
        weight=load.float32(weight, sizes.n_cols),
        bias=load.float32(bias, sizes.n_cols),
        shares=load.float32(shares, sizes.n_heads, sizes.hidden),
        turn=hadamard(sizes.n_cols).to(load.device) if load.half_cache else None,
    )
