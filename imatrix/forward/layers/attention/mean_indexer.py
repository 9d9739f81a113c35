"""The indexer of Qwen4Exp: which blocks of earlier positions each token attends to.

A block's key is the mean of its positions' keys, normed, and rotated as its first position. Its score is what
heads relu(query . key) add up to. A token attends to the best of the blocks that have ended, and to the
positions behind them; all heads have the same choice. While all blocks fit, all are attended to, and nothing
is computed.

The choice has no gradient, so a differentiated pass shows observers none for these matrices.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch.nn.functional import linear

from imatrix.forward.layers.attention import QUERY_BLOCK
from imatrix.forward.layers.attention.chosen_blocks import ChosenBlocks
from imatrix.forward.layers.attention.compressed import not_counting
from imatrix.forward.layers.load import Loader
from imatrix.forward.layers.residual import RMSNorm
from imatrix.forward.layers.rope import Rotation


@dataclass(frozen=True)
class MeanSizes:
    """Sizes of a MeanIndexer.

    n_cols    of a head
    length    positions of a block
    n_chosen  blocks that a token attends to
    """

    n_heads: int
    n_cols: int
    length: int
    n_chosen: int


@dataclass(frozen=True)
class MeanIndexer:
    """The indexer of one layer.

    names    of the matrices of queries and keys
    queries  (n_heads * n_cols, hidden_size)
    keys     (n_cols, hidden_size)
    """

    names: tuple[str, str]
    sizes: MeanSizes
    rotate: Rotation
    queries: torch.Tensor
    keys: torch.Tensor
    query_norm: RMSNorm
    key_norm: RMSNorm

    def work(self, n_tokens: int) -> int:
        """Estimate the multiplications per token of a chunk of `n_tokens`."""
        n_blocks = n_tokens // self.sizes.length
        return self.queries.numel() + self.keys.numel() + len(self.queries) * n_blocks

    @torch.no_grad()
    def choice(self, x: torch.Tensor) -> ChosenBlocks | None:
        """Choose the blocks that each token of a chunk attends to; None: all.

        x  the normed hidden states, (n_tokens, hidden_size)
        """
        n_tokens, sizes = len(x), self.sizes
        n_blocks = n_tokens // sizes.length
        if n_blocks <= sizes.n_chosen:
            return None
        key = linear(x, self.keys)[: n_blocks * sizes.length].float()
        key = self.key_norm(key.unflatten(0, (n_blocks, -1)).mean(1))
        every = replace(self.rotate, turns=self.rotate.turns[:: sizes.length])
        key = _rotated(key[:, None], every)[:, 0]
        query = self.query_norm(linear(x, self.queries).unflatten(-1, (sizes.n_heads, -1)))
        query = _rotated(query, self.rotate)
        # The last block may not have ended by the end of the chunk.
        chosen = torch.ones((n_tokens, -(-n_tokens // sizes.length)), dtype=torch.bool, device=x.device)
        for start in range(0, n_tokens, QUERY_BLOCK):
            stop = min(n_tokens, start + QUERY_BLOCK)
            scores = torch.relu(query[start:stop] @ key.T).sum(1)
            early = not_counting(start, stop, n_blocks, sizes.length, x.device)
            best = scores.masked_fill_(early, float("-inf")).topk(sizes.n_chosen, -1).indices
            chosen[start:stop, :n_blocks] = early.scatter(1, best, True)
        return ChosenBlocks(chosen[None], sizes.length)


def _rotated(heads: torch.Tensor, rotate: Rotation) -> torch.Tensor:
    """Return queries or keys, (n_positions, n_heads, n_cols), with their first columns rotated; float32."""
    n_rotated = 2 * rotate.turns.shape[1]
    return torch.cat((rotate(heads[..., :n_rotated]), heads[..., n_rotated:].float()), -1)


def load_mean_indexer(
    load: Loader, layer: int, sizes: MeanSizes, rotate: Rotation, hidden: int, eps: float
) -> MeanIndexer:
    """Read the indexer of a layer."""
    name = f"blk.{layer}.indexer"
    names = f"{name}.q_proj.weight", f"{name}.k_proj.weight"
    return MeanIndexer(
        names=names,
        sizes=sizes,
        rotate=rotate,
        queries=load.matrix(names[0], sizes.n_heads * sizes.n_cols, hidden),
        keys=load.matrix(names[1], sizes.n_cols, hidden),
        query_norm=RMSNorm(load.float32(f"{name}.q_norm.weight", sizes.n_cols), eps),
        key_norm=RMSNorm(load.float32(f"{name}.k_norm.weight", sizes.n_cols), eps),
    )
