"""Residual that chooses among the hidden states of earlier layers, as in Kimi K3.

Before one layer in so many, hidden states are kept, and begin anew with what its attention adds. A part of a
layer sees a mean of those kept and of the present ones, weighed by a softmax of scores: each state, normed,
times one row. Kept states stand behind the present ones, in the order of their layers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import linear

from imatrix.forward.layers.residual import ResidualStream, unit_rows
from imatrix.forward.observe import Observer


@dataclass(frozen=True)
class ScoredStates:
    """Residual around one part of a layer, or the end of a model.

    score   float32 (hidden_size,)
    n_kept  states that have been kept before
    keeps   whether the present ones are kept here
    """

    score: torch.Tensor
    eps: float
    n_kept: int
    keeps: bool = False

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the mean, float32 (n_tokens, hidden_size)."""
        n_cols = len(self.score)
        states = hidden[:, : n_cols * (1 + self.n_kept)].unflatten(-1, (-1, n_cols))
        if not self.n_kept:
            return states[:, 0]
        shares = torch.softmax(linear(unit_rows(states, self.eps), self.score), -1)
        return torch.matmul(shares[:, None], states)[:, 0]

    def enter(self, hidden: torch.Tensor, observer: Observer) -> ResidualStream:
        """Split one chunk's states into the part's input and what goes past it; see `Residual`."""
        x = self(hidden)
        if not self.keeps:
            return ResidualStream(x, hidden)
        n_cols, place = len(self.score), len(self.score) * (1 + self.n_kept)
        present, kept, later = hidden[:, :n_cols], hidden[:, n_cols:place], hidden[:, place + n_cols :]
        return ResidualStream(x, torch.cat((torch.zeros_like(present), kept, present, later), -1))
