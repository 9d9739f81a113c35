"""The indexer of MiniMax-M3: which blocks of earlier positions each token attends to.

It has a query for each head of keys, and one key, both made of the normed hidden state, normed and rotated.
A block's score is the largest product of the query with a key in it, among those up to the token's own. Each
head of keys has its own choice: the token's block, as many before it as are always chosen, and then the best.
While there are no more blocks than may be chosen, all are, and nothing is computed.

The choice has no gradient, so a differentiated pass shows observers none for these matrices.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import linear, pad

from convert.architectures.minimax_m3 import BlockIndexer as Sizes
from imatrix.forward.layers.attention import QUERY_BLOCK
from imatrix.forward.layers.attention.chosen_blocks import ChosenBlocks
from imatrix.forward.layers.llama_rounding import round_f16
from imatrix.forward.layers.load import Loader
from imatrix.forward.layers.residual import RMSNorm
from imatrix.forward.layers.rope import Rotation


@dataclass(frozen=True)
class BlockIndexer:
    """The indexer of one layer.

    names           of its matrices
    rotated         columns of a head that are rotated, the first ones
    queries, keys   (n_heads * head_dim, hidden_size), (head_dim, hidden_size)
    half_cache      whether keys are rounded as in llama.cpp's cache
    """

    names: tuple[str, str]
    sizes: Sizes
    rotate: Rotation
    rotated: int
    queries: torch.Tensor
    keys: torch.Tensor
    q_norm: RMSNorm
    k_norm: RMSNorm
    half_cache: bool

    def work(self, n_tokens: int) -> int:
        """Estimate the multiplications per token of a chunk of `n_tokens`."""
        return self.queries.numel() + self.keys.numel() + len(self.queries) * n_tokens // 2

    @torch.no_grad()
    def choice(self, x: torch.Tensor) -> ChosenBlocks | None:
        """Choose the blocks that each token of a chunk attends to; None: all.

        x  the normed hidden states, (n_tokens, hidden_size)
        """
        n_tokens, sizes = len(x), self.sizes
        n_blocks = -(-n_tokens // sizes.block_size)
        if n_blocks <= sizes.n_chosen:
            return None
        scores = self._scores(x, n_blocks)
        tokens = torch.arange(n_tokens, device=x.device)
        for before in range(sizes.n_local):
            scores[:, tokens, (tokens // sizes.block_size - before).clamp(min=0)] = float("inf")
        best = scores.topk(sizes.n_chosen, -1).indices
        return ChosenBlocks(
            torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, best, True), sizes.block_size
        )

    def _scores(self, x: torch.Tensor, n_blocks: int) -> torch.Tensor:
        """Return the scores of blocks for tokens, (n_heads, n_tokens, n_blocks); -inf for later ones."""
        n_tokens, sizes = len(x), self.sizes
        queries = self._placed(linear(x, self.queries), self.q_norm).transpose(0, 1)
        keys = self._placed(linear(x, self.keys), self.k_norm)[:, 0]
        keys = round_f16(keys) if self.half_cache else keys
        behind = n_blocks * sizes.block_size - n_tokens
        scores = queries.new_empty((sizes.n_heads, n_tokens, n_blocks))
        for start in range(0, n_tokens, QUERY_BLOCK):
            stop = min(n_tokens, start + QUERY_BLOCK)
            later = torch.full((stop - start, n_tokens), float("-inf"), device=x.device).triu_(start + 1)
            products = pad(queries[:, start:stop] @ keys.T + later, (0, behind), value=float("-inf"))
            scores[:, start:stop] = products.unflatten(-1, (n_blocks, sizes.block_size)).amax(-1)
        return scores

    def _placed(self, product: torch.Tensor, norm: RMSNorm) -> torch.Tensor:
        """Return queries or keys of a chunk, (n_tokens, n_heads, head_dim), normed and rotated; float32."""
        heads = norm(product.unflatten(-1, (-1, self.sizes.head_dim))).float()
        return torch.cat((self.rotate(heads[..., : self.rotated]), heads[..., self.rotated :]), -1)


def load_block_indexer(
    load: Loader, layer: int, sizes: Sizes, hidden: int, rotate: Rotation, rotated: int, eps: float
) -> BlockIndexer:
    """Read the indexer of a layer.

    hidden   columns of the hidden states
    rotated  columns of a head that are rotated, the first ones
    eps      of its norms
    """
    queries, keys = (f"blk.{layer}.indexer.{part}_proj.weight" for part in ("q", "k"))
    q_norm, k_norm = (
        RMSNorm(load.float32(f"blk.{layer}.indexer.{part}_norm.weight", sizes.head_dim), eps)
        for part in ("q", "k")
    )
    return BlockIndexer(
        names=(queries, keys),
        sizes=sizes,
        rotate=rotate,
        rotated=rotated,
        queries=load.matrix(queries, sizes.n_heads * sizes.head_dim, hidden),
        keys=load.matrix(keys, sizes.head_dim, hidden),
        q_norm=q_norm,
        k_norm=k_norm,
        half_cache=load.half_cache,
    )
