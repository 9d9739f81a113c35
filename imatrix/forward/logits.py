"""Logits of all tokens, some rows of the vocabulary at a time: each output matrix is read once.

All logits of a text are too many to keep, and a softmax needs them all. So the vocabulary is swept in slices.
Every visitor is shown each slice for every chunk, and keeps running sums. One model has a perplexity, and two
models of the same vocabulary have a divergence: visitors get the slices of all models side by side.

Perplexity is measured as llama-imatrix does. Each scored token, of a text those in a chunk's second half, is
predicted from what precedes it in the chunk. Perplexity is the exponential of the mean negative log
probability; its error follows from the standard error of that mean. Per token, only the logarithm of the sum
of exponentials and the right token's logit are kept. As chunks are finished one after the other, the running
perplexity is known.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np
import torch
from torch.nn.functional import linear

from gguf_tools.errors import BadRequest
from imatrix.forward.device import to_cpu, to_torch
from imatrix.forward.hidden_states import Rows
from imatrix.forward.layers.load import Loader
from imatrix.forward.network import AS_THEY_ARE, End, LogitRule, Network
from imatrix.forward.workers import Workers
from imatrix.texts.chunks import Chunks, Ints

SLICE_ROWS = 8192
"""Number of rows of the vocabulary in a slice."""

SCORED = 0.5
"""The share of a text's tokens that are scored, about."""

PIECE_POSITIONS = 512
"""Number of positions that get their logits at a time: a slice of them takes 16 MB."""


@dataclass(frozen=True)
class OutputRows:
    """Rows of an output matrix, (n_rows, n_cols), and their biases, float32 (n_rows,); None for none."""

    weight: torch.Tensor
    bias: torch.Tensor | None


@dataclass(frozen=True)
class Head:
    """The end of a model: its last hidden states, and what makes logits of them.

    norm    makes of them what the output matrix multiplies
    matrix  name of the output matrix, (vocab_size, hidden_size)
    rule    what becomes of its product
    bias    float32 (vocab_size,): what is added to the product; None for nothing
    """

    load: Loader
    states: Rows
    norm: End
    matrix: str
    rule: LogitRule = AS_THEY_ARE
    bias: torch.Tensor | None = None

    @classmethod
    def of(cls, network: Network, load: Loader, states: Rows) -> Self:
        """Load the end of a model; `states` are its last hidden states."""
        bias = network.load_output_bias(load)
        return cls(load, states, network.load_end(load), network.output, network.logits, bias)

    @property
    def path(self) -> Path:
        return self.load.path

    @property
    def vocab_size(self) -> int:
        return self.load.tensor(self.matrix).shape[0]

    def read(self, start: int, stop: int) -> OutputRows:
        """Return rows `start` to `stop` of the output matrix."""
        weight = self.load.weight(self.load.tensor(self.matrix), start, stop)
        return OutputRows(weight, None if self.bias is None else self.bias[start:stop])

    def logits(self, tokens: torch.Tensor, rows: OutputRows) -> torch.Tensor:
        """Return the float32 logits after some tokens for some rows of the matrix."""
        products = linear(self.inputs(tokens), rows.weight).float()
        return self.rule(products if rows.bias is None else products.add_(rows.bias))

    def inputs(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the inputs of the matrix after some tokens, (n_tokens, n_cols)."""
        hidden = self.states.rows(tokens).to(self.load.device)
        return self.norm(hidden).to(self.load.dtype)


class LogitSource(Protocol):
    """Where logits come from, slice by slice: a model's end, or a file."""

    @property
    def path(self) -> Path: ...

    @property
    def vocab_size(self) -> int: ...

    def read(self, start: int, stop: int) -> Any:
        """Read what `logits` needs for tokens `start` to `stop` of the vocabulary, in any form."""

    def logits(self, tokens: torch.Tensor, rows: Any, /) -> torch.Tensor:
        """Return the float32 logits after some tokens of a chunk, for what `read` has read.

        tokens  ascending numbers, int64 (n,)
        """


@dataclass(frozen=True, eq=False)
class Positions:
    """Which tokens of a text get logits: those after which a prediction is wanted.

    tokens  their numbers, ascending, int64 (n_positions,)
    bounds  int64 (n_chunks + 1,): those of chunk i are tokens[bounds[i] : bounds[i + 1]]
    """

    tokens: torch.Tensor
    bounds: Ints

    @classmethod
    def of(cls, chunks: Chunks, tokens: Ints) -> Self:
        """Divide tokens, by their ascending numbers, among the chunks that they are in."""
        return cls(to_torch(tokens), np.searchsorted(tokens, chunks.bounds))

    @property
    def n_chunks(self) -> int:
        return len(self.bounds) - 1

    def place(self, chunk: int) -> slice:
        """Return where the chunk's positions are among all."""
        return slice(int(self.bounds[chunk]), int(self.bounds[chunk + 1]))

    def within(self, chunks: range) -> Self:
        """Return those of some chunks that follow each other."""
        bounds = self.bounds[chunks.start : chunks.stop + 1]
        return type(self)(self.tokens[int(bounds[0]) : int(bounds[-1])], bounds - bounds[0])

    def of_chunk(self, chunk: int) -> torch.Tensor:
        """Return the numbers of the chunk's tokens that get logits."""
        return self.tokens[self.place(chunk)]

    def pieces(self, chunk: int) -> Iterator[slice]:
        """Yield the chunk's place in pieces whose logits take little memory."""
        place = self.place(chunk)
        for start in range(place.start, place.stop, PIECE_POSITIONS):
            yield slice(start, min(place.stop, start + PIECE_POSITIONS))


class LogitVisitor(Protocol):
    """Takes in logits slice by slice.

    Several threads call `visit`, but never two for the same chunk at a time. A position's slices come in the
    order of the vocabulary.
    """

    def visit(self, at: slice, first: int, logits: Sequence[torch.Tensor]) -> None:
        """Take in one slice of some positions of a chunk.

        at      their place among all positions
        first   token of the slice's first column
        logits  per model float32 (n_positions, n_tokens), on its device; not to be changed
        """

    def finish_chunk(self, chunk: int) -> None:
        """The whole vocabulary has been shown for this chunk; called once for each, in order."""


def slices(vocab_size: int) -> Iterator[tuple[int, int]]:
    """Yield the first row of every slice, and the one behind its last."""
    for first in range(0, vocab_size, SLICE_ROWS):
        yield first, min(vocab_size, first + SLICE_ROWS)


@torch.inference_mode()
def sweep_vocabulary(
    heads: Sequence[LogitSource],
    positions: Positions,
    visitors: Sequence[LogitVisitor],
    n_workers: int = 1,
    advance: Callable[[float], object] = lambda share: None,
) -> None:
    """Show the logits of one or more models to all visitors.

    heads      of models with the same vocabulary
    n_workers  threads that take chunks
    advance    called with the share of all that has been shown since the last call
    raises     BadRequest for vocabularies of different sizes
    """
    sizes = [head.vocab_size for head in heads]
    if len(set(sizes)) > 1:
        shown = ", ".join(f"{head.path} has {size}" for head, size in zip(heads, sizes, strict=True))
        raise BadRequest(f"models with vocabularies of different sizes: {shown} tokens")

    def take_chunk(task: tuple[int, int, list[Any]]) -> int:
        chunk, first, read = task
        for at in positions.pieces(chunk):
            tokens = positions.tokens[at]
            logits = [head.logits(tokens, rows) for head, rows in zip(heads, read, strict=True)]
            for visitor in visitors:
                visitor.visit(at, first, logits)
        return chunk

    with Workers(n_workers) as workers:
        for first, stop in slices(sizes[0]):
            read = [head.read(first, stop) for head in heads]
            tasks = ((chunk, first, read) for chunk in range(positions.n_chunks))
            for chunk in workers.each(take_chunk, tasks):
                advance((stop - first) / sizes[0] / positions.n_chunks)
                if stop == sizes[0]:
                    for visitor in visitors:
                        visitor.finish_chunk(chunk)


class _LogSums:
    """A LogitVisitor that keeps the logarithm of the sum of exponentials of each position, for each model."""

    def __init__(self, heads: Sequence[Head], n_positions: int) -> None:
        self.values = [
            torch.full((n_positions,), float("-inf"), dtype=torch.float64, device=head.load.device)
            for head in heads
        ]

    def visit(self, at: slice, first: int, logits: Sequence[torch.Tensor]) -> None:
        for sums, each in zip(self.values, logits, strict=True):
            values = sums[at]
            values.copy_(torch.logaddexp(values, torch.logsumexp(each, -1).double()))

    def finish_chunk(self, chunk: int) -> None:
        """Nothing is left to do."""


def log_sums(heads: Sequence[Head], positions: Positions, n_workers: int = 1) -> list[torch.Tensor]:
    """Compute the logarithm of the sum of exponentials: for each model float64 (n_positions,)."""
    sums = _LogSums(heads, len(positions.tokens))
    sweep_vocabulary(heads, positions, [sums], n_workers)
    return sums.values


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

    def __init__(self, chunks: Chunks, device: torch.device, report: Callable[[Perplexity], None]) -> None:
        self.positions = predicted_positions(chunks)
        self.perplexity = Perplexity()
        self._report = report
        self._targets = to_torch(chunks.tokens[chunks.scored], device)
        shape = self._targets.shape
        self._log_sums = torch.full(shape, float("-inf"), dtype=torch.float64, device=device)
        self._right = torch.zeros(shape, dtype=torch.float64, device=device)

    def visit(self, at: slice, first: int, logits: Sequence[torch.Tensor]) -> None:
        (only,) = logits
        log_sums, targets = self._log_sums[at], self._targets[at]
        self._log_sums[at] = torch.logaddexp(log_sums, torch.logsumexp(only, -1).double())
        here = (targets >= first) & (targets < first + only.shape[1])
        self._right[at][here] = only[here, targets[here] - first].double()

    def finish_chunk(self, chunk: int) -> None:
        place = self.positions.place(chunk)
        losses = to_cpu(self._log_sums[place] - self._right[place])
        if len(losses):
            self.perplexity.add_chunk(losses)
            self._report(self.perplexity)


def predicted_positions(chunks: Chunks) -> Positions:
    """Return the positions whose next token is scored."""
    return Positions.of(chunks, np.flatnonzero(chunks.scored) - 1)


def every_position(chunks: Chunks) -> Positions:
    """Return all positions of all chunks."""
    return Positions.of(chunks, np.arange(chunks.n_tokens))


def measure(
    head: Head,
    chunks: Chunks,
    report: Callable[[Perplexity], None],
    n_workers: int = 1,
    advance: Callable[[float], object] = lambda share: None,
) -> Perplexity:
    """Measure the perplexity of a text; `report` is called after every chunk.

    head       the model's, with the hidden states of the whole text
    n_workers  threads that take chunks
    advance    called with the share that has been measured since the last call
    """
    visitor = PerplexityVisitor(chunks, head.load.device, report)
    sweep_vocabulary([head], visitor.positions, [visitor], n_workers, advance)
    return visitor.perplexity
