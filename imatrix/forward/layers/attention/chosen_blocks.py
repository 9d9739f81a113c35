"""Blocks of earlier positions that tokens attend to, as an indexer chooses them; the others are left out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True)
class ChosenBlocks:
    """The blocks that each token attends to.

    chosen      bool (n_kv_heads, n_tokens, n_blocks), or (1, ...) for the same in all heads; what it says of
                blocks after a token's own counts not
    block_size  positions of a block
    """

    chosen: torch.Tensor
    block_size: int

    def left_out(self, heads: slice, start: int, stop: int) -> torch.Tensor:
        """Mark the positions before `stop` that tokens don't attend to, (n_heads, 1, stop - start, stop)."""
        n_blocks = -(-stop // self.block_size)
        chosen = self.chosen if len(self.chosen) == 1 else self.chosen[heads]
        chosen = chosen[:, None, start:stop, :n_blocks]
        return ~chosen.repeat_interleave(self.block_size, -1)[..., :stop]


class BlockChooser(Protocol):
    """Something that chooses blocks by matrices of its own."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of its matrices, which multiply the normed hidden states."""

    def work(self, n_tokens: int) -> int:
        """Estimate the multiplications per token of a chunk of `n_tokens`."""

    def choice(self, x: torch.Tensor) -> ChosenBlocks | None:
        """Choose the blocks that each token of a chunk attends to; None: all.

        x  the normed hidden states, (n_tokens, hidden_size)
        """
