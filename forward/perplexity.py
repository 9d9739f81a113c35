"""How well a model predicts a text, measured as llama-imatrix does.

Each token of a chunk's second half is predicted from what precedes it in the chunk. Perplexity is the
exponential of the mean negative log probability; its error follows from the standard error of that mean.

Per token, only the logarithm of the sum of exponentials and the right token's logit are kept. As chunks are
finished one after the other, the running perplexity is known.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from forward.device import to_cpu, to_torch
from forward.logits import Head, Positions, sweep_vocabulary
from forward.text.tokens import Text

_LARGEST_LOSS = 700.0
"""Mean loss a little below what exp() can take; no model that makes sense comes near."""


@dataclass
class Perplexity:
    """A running perplexity.

    by_chunk  the estimate after each chunk
    """

    count: int = 0
    total: float = 0.0
    squares: float = 0.0
    by_chunk: list[float] = field(default_factory=list, repr=False)

    def add_chunk(self, losses: torch.Tensor) -> None:
        """Take in one chunk's negative log probabilities, float64."""
        self.count += losses.numel()
        self.total += float(losses.sum())
        self.squares += float(losses.square().sum())
        self.by_chunk.append(self.value)

    @property
    def value(self) -> float:
        if not self.count:
            return math.nan
        mean = self.total / self.count
        return math.exp(mean) if mean < _LARGEST_LOSS else math.inf

    @property
    def error(self) -> float:
        """One standard error; NaN with fewer than two tokens."""
        if self.count < 2:
            return math.nan
        mean = self.total / self.count
        variance = max(0.0, self.squares / self.count - mean * mean)
        return math.sqrt(variance / (self.count - 1)) * self.value


class PerplexityVisitor:
    """A LogitVisitor that measures the perplexity of a single model.

    report  called with the running perplexity after every chunk
    """

    def __init__(self, text: Text, device: torch.device, report: Callable[[Perplexity], None]) -> None:
        self.positions = predicted_positions(text)
        self.perplexity = Perplexity()
        self._report = report
        self._targets = to_torch(text.tokens[:, self.positions.first + 1 :], device)
        shape = self._targets.shape
        self._log_sums = torch.full(shape, float("-inf"), dtype=torch.float64, device=device)
        self._right = torch.zeros(shape, dtype=torch.float64, device=device)

    def visit(self, chunk: int, first: int, logits: Sequence[torch.Tensor]) -> None:
        (only,) = logits
        log_sums, targets = self._log_sums[chunk], self._targets[chunk]
        self._log_sums[chunk] = torch.logaddexp(log_sums, torch.logsumexp(only, -1).double())
        here = (targets >= first) & (targets < first + only.shape[1])
        self._right[chunk, here] = only[here, targets[here] - first].double()

    def finish_chunk(self, chunk: int) -> None:
        if self._targets.shape[1]:
            self.perplexity.add_chunk(to_cpu(self._log_sums[chunk] - self._right[chunk]))
            self._report(self.perplexity)


def predicted_positions(text: Text) -> Positions:
    """Return the positions whose next token is predicted: each chunk's second half but the last token."""
    return Positions(text.n_chunks, text.chunk_size, text.chunk_size // 2, text.chunk_size - 1)


def measure(head: Head, text: Text, report: Callable[[Perplexity], None], n_workers: int = 1) -> Perplexity:
    """Measure the perplexity of `text`; `report` is called after every chunk.

    head       the model's, with the hidden states of the whole text
    n_workers  threads that take chunks
    """
    visitor = PerplexityVisitor(text, head.load.device, report)
    sweep_vocabulary([head], visitor.positions, [visitor], n_workers)
    return visitor.perplexity
