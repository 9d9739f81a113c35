"""How well the model predicts its calibration text, as llama-imatrix measures it.

Each token of a chunk's second half is predicted from what stands before it in the chunk. Perplexity is the
exponential of the mean negative log probability; its error follows from that mean's standard error.

The output matrix is read once, some rows of the vocabulary at a time, for all chunks; per token only the
logarithm of the sum of exponentials and the right token's logit are kept. With the last rows the chunks
are done one after the other, and the running perplexity is known.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch.nn.functional import linear

from forward.load import Loader
from forward.norm import rms_norm
from forward.hidden_states import States
from forward.text import Text
from forward.workers import Workers

_SLICE_ROWS = 8192
_LARGEST_LOSS = 700.0
"""A little below what exp() can take; no model that makes sense comes near."""


@dataclass
class Perplexity:
    """A running perplexity.

    by_chunk  the estimate after each chunk
    """

    count: int = 0
    total: float = 0.0
    squares: float = 0.0
    by_chunk: list[float] = field(default_factory=list)

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


@torch.inference_mode()
def measure(
    load: Loader,
    text: Text,
    states: States,
    norm: torch.Tensor,
    report: Callable[[Perplexity], None],
    n_workers: int = 1,
) -> Perplexity:
    """Return the perplexity of `text`; `report` is called after every chunk.

    states     the last layer's output
    norm       weight of the output norm
    n_workers  threads that take chunks
    """
    config, first = load.model.config, text.chunk_size // 2
    tensor = load.model.tensor("token_embd.weight" if config.tie_word_embeddings else "output.weight")
    targets = torch.from_numpy(text.tokens[:, first + 1 :]).to(load.device)
    log_sums = torch.full(targets.shape, float("-inf"), dtype=torch.float64, device=load.device)
    right = torch.zeros(targets.shape, dtype=torch.float64, device=load.device)
    found = Perplexity()

    def take_chunk(part: tuple[int, int, torch.Tensor]) -> int:
        chunk, low, weight = part
        start = chunk * text.chunk_size
        hidden = states.read(start + first, start + text.chunk_size - 1).to(load.device)
        x = rms_norm(hidden, norm, config.rms_norm_eps)
        logits = linear(x.to(load.dtype), weight).float()
        log_sums[chunk] = torch.logaddexp(log_sums[chunk], torch.logsumexp(logits, -1).double())
        here = (targets[chunk] >= low) & (targets[chunk] < low + len(weight))
        right[chunk, here] = logits[here, targets[chunk, here] - low].double()
        return chunk

    with Workers(n_workers) as workers:
        for low in range(0, tensor.shape[0], _SLICE_ROWS):
            high = min(tensor.shape[0], low + _SLICE_ROWS)
            weight = load.rows(tensor, low, high, load.dtype)
            parts = ((chunk, low, weight) for chunk in range(text.n_chunks))
            for chunk in workers.each(take_chunk, parts):
                if high == tensor.shape[0] and targets.shape[1]:
                    found.add_chunk((log_sums[chunk] - right[chunk]).cpu())
                    report(found)
    return found
