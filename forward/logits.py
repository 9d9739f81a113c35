"""Logits of all tokens, some rows of the vocabulary at a time: each output matrix is read once.

All logits of a text are too many to keep, and a softmax needs them all. So the vocabulary is swept in slices.
Every visitor is shown each slice for every chunk, and keeps running sums. One model has a perplexity, and two
models of the same vocabulary have a divergence: visitors get the slices of all models side by side.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch.nn.functional import linear

from forward.hidden_states import Rows
from forward.layers.load import Loader
from forward.network import End
from forward.workers import Workers
from gguf_tools.errors import BadRequest

_SLICE_ROWS = 8192
"""Number of rows of the vocabulary in a slice."""


@dataclass(frozen=True)
class Head:
    """The end of a model: its last hidden states, and what makes logits of them.

    norm    makes of them what the output matrix multiplies
    matrix  name of the output matrix, (vocab_size, hidden_size)
    """

    load: Loader
    states: Rows
    norm: End
    matrix: str

    @property
    def path(self) -> Path:
        return self.load.path

    @property
    def vocab_size(self) -> int:
        return self.load.tensor(self.matrix).shape[0]

    def read(self, start: int, stop: int) -> torch.Tensor:
        """Return rows `start` to `stop` of the output matrix."""
        return self.load.weight(self.load.tensor(self.matrix), start, stop)

    def logits(self, start: int, stop: int, weight: torch.Tensor) -> torch.Tensor:
        """Return the float32 logits of hidden states `start` to `stop` for some rows of the matrix."""
        hidden = self.states.read(start, stop).to(self.load.device)
        return linear(self.norm(hidden).to(self.load.dtype), weight).float()


class LogitSource(Protocol):
    """Where logits come from, slice by slice: a model's end, or a file."""

    @property
    def path(self) -> Path: ...

    @property
    def vocab_size(self) -> int: ...

    def read(self, start: int, stop: int) -> torch.Tensor:
        """Read what `logits` needs for tokens `start` to `stop` of the vocabulary, in any form."""
        ...

    def logits(self, start: int, stop: int, weight: torch.Tensor) -> torch.Tensor:
        """Return the float32 logits after tokens `start` to `stop` of the text, for what `read` has read."""
        ...


@dataclass(frozen=True)
class Positions:
    """Which tokens of a text get logits.

    first, stop  positions within each chunk
    """

    n_chunks: int
    chunk_size: int
    first: int
    stop: int

    def rows(self, chunk: int) -> tuple[int, int]:
        """Return the range of the chunk's hidden states."""
        start = chunk * self.chunk_size
        return start + self.first, start + self.stop


class LogitVisitor(Protocol):
    """Takes in logits slice by slice.

    Several threads call `visit`, but never two for the same chunk at a time. A chunk's slices come in the
    order of the vocabulary.
    """

    def visit(self, chunk: int, first: int, logits: Sequence[torch.Tensor]) -> None:
        """Take in one slice of a chunk.

        first   token of the slice's first column
        logits  per model float32 (n_positions, n_tokens), on its device; not to be changed
        """
        ...

    def finish_chunk(self, chunk: int) -> None:
        """The whole vocabulary has been shown for this chunk; called once for each, in order."""
        ...


def slices(vocab_size: int) -> Iterator[tuple[int, int]]:
    """Yield the first row of every slice, and the one behind its last."""
    for first in range(0, vocab_size, _SLICE_ROWS):
        yield first, min(vocab_size, first + _SLICE_ROWS)


@torch.inference_mode()
def sweep_vocabulary(
    heads: Sequence[LogitSource], positions: Positions, visitors: Sequence[LogitVisitor], n_workers: int = 1
) -> None:
    """Show the logits of one or more models to all visitors.

    heads      of models with the same vocabulary
    n_workers  threads that take chunks
    raises     BadRequest for vocabularies of different sizes
    """
    sizes = [head.vocab_size for head in heads]
    if len(set(sizes)) > 1:
        shown = ", ".join(f"{head.path} has {size}" for head, size in zip(heads, sizes, strict=True))
        raise BadRequest(f"models with vocabularies of different sizes: {shown} tokens")

    def take_chunk(task: tuple[int, int, list[torch.Tensor]]) -> int:
        chunk, first, weights = task
        rows = positions.rows(chunk)
        logits = [head.logits(*rows, weight) for head, weight in zip(heads, weights, strict=True)]
        for visitor in visitors:
            visitor.visit(chunk, first, logits)
        return chunk

    with Workers(n_workers) as workers:
        for first, stop in slices(sizes[0]):
            weights = [head.read(first, stop) for head in heads]
            tasks = ((chunk, first, weights) for chunk in range(positions.n_chunks))
            for chunk in workers.each(take_chunk, tasks):
                if stop == sizes[0]:
                    for visitor in visitors:
                        visitor.finish_chunk(chunk)
