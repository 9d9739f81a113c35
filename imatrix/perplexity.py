"""How well the model predicts its calibration text, as llama-imatrix measures it.

Each token of a chunk's second half is predicted from what stands before it in the chunk. Perplexity is the
exponential of the mean negative log probability; its error follows from that mean's standard error.

The output matrix is read once, some rows of the vocabulary at a time, for all chunks; per token only the
largest logit, the sum of exponentials and the right token's logit are kept. With the last rows the chunks
are done one after the other, and the running perplexity is known.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch.nn.functional import linear

from imatrix.model.load import Loader
from imatrix.model.norm import rms_norm
from imatrix.states import States
from imatrix.text import Text

_SLICE_BYTES = 256 << 20
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
    load: Loader, text: Text, states: States, norm: torch.Tensor, report: Callable[[Perplexity], None]
) -> Perplexity:
    """Return the perplexity of `text`; `report` is called after every chunk.

    states  the last layer's output
    norm    weight of the output norm
    """
    config, first, n_cols = load.model.config, text.chunk_size // 2, load.model.config.hidden_size
    tensor = load.model.tensor("token_embd.weight" if config.tie_word_embeddings else "output.weight")
    targets = torch.from_numpy(text.tokens[:, first + 1 :]).to(load.device)
    best = torch.full(targets.shape, float("-inf"), device=load.device)
    total = torch.zeros(targets.shape, device=load.device)
    right = torch.zeros(targets.shape, device=load.device)
    found = Perplexity()
    step = max(1, _SLICE_BYTES // (4 * n_cols))
    for low in range(0, tensor.shape[0], step):
        high = min(tensor.shape[0], low + step)
        weight = load.rows(tensor, low, high, load.dtype)
        for chunk in range(text.n_chunks):
            start = chunk * text.chunk_size
            hidden = states.read(start + first, start + text.chunk_size - 1).to(load.device)
            x = rms_norm(hidden, norm, config.rms_norm_eps)
            logits = linear(x.to(load.dtype), weight).float()
            if not len(logits):
                continue
            new = torch.maximum(best[chunk], logits.max(-1).values)
            scaled = total[chunk] * torch.exp(best[chunk] - new)
            total[chunk] = scaled + torch.exp(logits - new[:, None]).sum(-1)
            best[chunk] = new
            here = (targets[chunk] >= low) & (targets[chunk] < high)
            right[chunk, here] = logits[here, targets[chunk, here] - low]
            if high == tensor.shape[0]:
                losses = best[chunk].double() + torch.log(total[chunk].double()) - right[chunk].double()
                found.add_chunk(losses.cpu())
                report(found)
    return found
