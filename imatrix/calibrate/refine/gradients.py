"""Derivatives of the divergence by the scales of a file, over a batch of chunks.

    embeddings -> layer 0 -> ... -> last hidden states -> divergence -> last layer -> ... -> embeddings

Hidden states of all layers stay in memory, as a batch is small. On the way back each layer is computed again
and differentiated (imatrix/forward/gradients/differentiate.py), and an observer turns what a matrix
multiplied and the gradient at its product into derivatives by the matrix' scales.

KL(p || q) of p, the original's next-token probabilities, and q, the file's, has the gradient q - p at the
file's logits. The vocabulary is swept in slices as in imatrix/forward/logits.py, so all logits of a text are
never in memory. A first sweep finds the logarithm of the sum of exponentials of each position, a second all
else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.functional import pad

from imatrix.calibrate.refine.descent import RefinedTensor, RowGradients
from imatrix.forward.device import to_cpu, to_numpy, to_torch
from imatrix.forward.gradients.backward import BACKWARD_WORK, through_norm
from imatrix.forward.gradients.differentiate import BackwardStates, differentiate_layer
from imatrix.forward.hidden_states import MemoryStates, States
from imatrix.forward.layers.load import Loader
from imatrix.forward.logits import Head, OutputRows, Positions, every_position, log_sums, slices
from imatrix.forward.network import EMBEDDINGS, Network
from imatrix.forward.observe import Arrays, Silent
from imatrix.forward.run import embed
from imatrix.forward.sweep import Execution, LayerBuffers, Sweep, run_layer
from imatrix.forward.workers import Workers
from imatrix.texts.chunks import Chunks
from quantize.formats.base import Floats32

TakeProduct = Callable[[int, torch.Tensor, torch.Tensor], None]
"""Is given the first row of a slice of the head, what that multiplies, and the gradient at the product."""


@dataclass(frozen=True)
class Predictions:
    """The predictions of an original and of a file at the same positions.

    positions  of the tokens of both heads
    sums       of both, float64 (n_positions,) on the CPU, see `log_sums`
    """

    original: Head
    file: Head
    positions: Positions
    sums: tuple[torch.Tensor, torch.Tensor]

    def divergences(self, workers: Workers) -> torch.Tensor:
        """Compute KL(p || q) of each position, float64 (n_positions,)."""
        found = torch.zeros(len(self.positions.tokens), dtype=torch.float64)
        for at, _, here in self._sweep(workers, lambda chunk, first, weight, by_logit: None):
            found[at] += here
        return found

    def gradients(self, workers: Workers, into: States, take: TakeProduct) -> torch.Tensor:
        """Compute the divergences, and fill `into` with gradients of their mean at the last hidden states.

        into  float32, as large as the file's hidden states
        take  is called for every slice and chunk, in order
        """
        n_behind = self.file.load.tensor(self.file.matrix).shape[-1]
        n_positions = len(self.positions.tokens)

        def take_slice(chunk: int, first: int, weight: torch.Tensor, by_logit: torch.Tensor) -> torch.Tensor:
            at = self.positions.place(chunk)
            at_logits = by_logit.div_(n_positions).to(weight.device, weight.dtype)
            at_x = to_cpu((at_logits @ weight).float())
            at_x = at_x if first == 0 else at_x + into.read(at.start, at.stop)[:, :n_behind]
            into.write(at.start, pad(at_x, (0, into.n_cols - n_behind)))
            return at_logits

        found = torch.zeros(n_positions, dtype=torch.float64)
        for at, (first, at_logits), here in self._sweep(workers, take_slice):
            found[at] += here
            x = self.file.norm(self.file.states.rows(self.positions.tokens[at]).to(self.file.load.device))
            take(first, x, at_logits)
        through_norm(self.file, self.positions, into, n_behind, workers)
        return found

    def _sweep(
        self, workers: Workers, make: Callable[[int, int, torch.Tensor, torch.Tensor], Any]
    ) -> Iterator[tuple[slice, tuple[int, Any], torch.Tensor]]:
        """Yield, slice by slice and chunk by chunk, the positions, what `make` makes, and divergences.

        make  is given the chunk, the slice's first row, the file's rows and the gradient at their products
        """
        for first, stop in slices(self.file.vocab_size):
            read = self.original.read(first, stop), self.file.read(first, stop)

            def take_chunk(
                chunk: int, first: int = first, read: tuple[OutputRows, OutputRows] = read
            ) -> tuple[slice, tuple[int, Any], torch.Tensor]:
                at = self.positions.place(chunk)
                tokens, sums = self.positions.tokens[at], [each[at, None].float() for each in self.sums]
                expected = to_cpu(self.original.logits(tokens, read[0])).sub_(sums[0])
                logits = to_cpu(self.file.logits(tokens, read[1]))
                slope = self.file.rule.slope(logits)
                found = logits.sub_(sums[1])
                p, q = expected.exp(), found.exp()
                here = (p * expected.sub_(found)).sum(-1).double()
                return at, (first, make(chunk, first, read[1].weight, q.sub_(p).mul_(slope))), here

            yield from workers.each(take_chunk, range(self.positions.n_chunks))


def by_weights(x: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """Compute derivatives by weights from what these multiply and the gradients at the products.

    x, gradient  see `ObservesGradients`; x has one matrix where all multiply the same
    returns      float32 (n_some, n_rows, n_cols), on the CPU
    """
    product = torch.matmul(gradient.permute(1, 2, 0), x.permute(1, 0, 2).to(gradient.dtype))
    return to_cpu(product).float()


class ScaleGradients(Silent):
    """An ObservesGradients that keeps derivatives by the scales of some tensors.

    A matrix that is alone is kept as the derivative by its weights until all chunks are in; those of a stack
    are turned into derivatives by scales at once, as a layer of experts would not fit into memory.
    """

    def __init__(self, tensors: Mapping[str, RefinedTensor]) -> None:
        self._tensors = tensors
        self._whole: dict[str, torch.Tensor] = {}
        self._by_rows: dict[tuple[str, int], Floats32] = {}

    def tokens(self, numbers: torch.Tensor) -> None:
        """Ignore which tokens they are: all count alike."""

    def gradient(self, name: str, first: int, n_blocks: int, x: torch.Tensor, gradient: torch.Tensor) -> None:
        """See `ObservesGradients`."""
        tensor = self._tensors.get(name)
        if tensor is None:
            return
        by_weight = by_weights(x, gradient)
        if n_blocks == 1:
            self._add_whole(name, by_weight[0])
            return
        n_rows = tensor.n_rows // n_blocks
        for at, each in enumerate(by_weight):
            self.add_rows(name, (first + at) * n_rows, each)

    def add_rows(self, name: str, first: int, by_weight: torch.Tensor) -> None:
        """Add the derivative by the weights of some rows, float32 (n_rows, n_cols)."""
        tensor = self._tensors.get(name)
        if tensor is not None:
            rows = tensor.stored_rows(first, first + len(by_weight))
            self._add(name, first, tensor.scales.by_change(rows, to_numpy(by_weight)))

    def fresh(self) -> Self:
        return type(self)(self._tensors)

    def merge(self, other: Self) -> None:
        for name, by_weight in other._whole.items():
            self._add_whole(name, by_weight)
        for (name, first), derivative in other._by_rows.items():
            self._add(name, first, derivative)

    def finish(self) -> list[RowGradients]:
        """Return the derivatives by the changes of scales, of all that was seen."""
        while self._whole:
            name, by_weight = self._whole.popitem()
            self.add_rows(name, 0, by_weight)
        return [RowGradients(name, first, values) for (name, first), values in self._by_rows.items()]

    def arrays(self) -> Arrays:
        return {}

    def _add_whole(self, name: str, by_weight: torch.Tensor) -> None:
        before = self._whole.get(name)
        self._whole[name] = by_weight if before is None else before.add_(by_weight)

    def _add(self, name: str, first: int, derivative: Floats32) -> None:
        before = self._by_rows.get((name, first))
        self._by_rows[name, first] = derivative if before is None else before + derivative


@dataclass(frozen=True)
class Original:
    """The original's end, and its last hidden states of a whole text.

    head  its `states` are those of the whole text
    sums  see `Predictions`
    """

    head: Head
    sums: torch.Tensor

    @classmethod
    def of(cls, head: Head, chunks: Chunks, n_workers: int) -> Self:
        """Compute the sums of all chunks."""
        (sums,) = log_sums([head], every_position(chunks), n_workers)
        return cls(head, to_cpu(sums))

    def at(self, numbers: torch.Tensor) -> Self:
        """Return the same for some tokens, by their ascending numbers in the text."""
        rows = self.head.states.rows(numbers)
        states = MemoryStates(*rows.shape)
        states.write(0, rows)
        return type(self)(replace(self.head, states=states), self.sums[numbers])


@dataclass(frozen=True)
class Batch:
    """Some chunks of a text.

    numbers  of their tokens in the text, ascending
    """

    chunks: Chunks
    sweep: Sweep
    numbers: torch.Tensor

    def states(self, n_cols: int, dtype: torch.dtype = torch.float32) -> MemoryStates:
        return MemoryStates(self.chunks.n_tokens, n_cols, dtype)


@dataclass(frozen=True)
class Student:
    """The file that is refined, as it stands.

    load     reads its weights, refined ones among them
    tensors  those that are refined
    chunks   of the whole text
    advance  is called with the share of a layer that was computed, in units of a forward pass
    """

    network: Network
    load: Loader
    tensors: Mapping[str, RefinedTensor]
    chunks: Chunks
    n_workers: int
    advance: Callable[[float], None]

    def divergences(self, original: Original, wanted: Iterable[int]) -> npt.NDArray[np.float64]:
        """Compute KL(original || file) at each token of some chunks, float64 (n_tokens,)."""
        batch = self.batch(wanted)
        here, there = (batch.states(self.network.state_size) for _ in range(2))
        self._embed(batch, here)
        for layer in range(self.network.n_layers):
            self.compute(batch, layer, here, there)
            here, there = there, here
        with Workers(self.n_workers) as workers:
            return to_numpy(self._predictions(original, batch, here).divergences(workers))

    def gradients(self, original: Original, wanted: Iterable[int]) -> tuple[float, list[RowGradients]]:
        """Compute the mean divergence over some chunks, and its derivatives by the changes of all scales."""
        network, batch = self.network, self.batch(wanted)
        states = [batch.states(network.state_size) for _ in range(network.n_layers + 1)]
        self._embed(batch, states[0])
        for layer in range(network.n_layers):
            self.compute(batch, layer, states[layer], states[layer + 1])
        after, before = batch.states(network.state_size), batch.states(network.state_size)
        divergence, gradients = self._at_end(original, batch, states.pop(), after)
        middle = batch.states(network.hidden_size, self.load.dtype)
        middle_gradients, latent = batch.states(network.hidden_size), batch.states(network.latent_cols)
        execution = Execution(self.n_workers, lambda share: self.advance(BACKWARD_WORK * share))
        for layer in reversed(range(network.n_layers)):
            observer = ScaleGradients(self.tensors)
            rows = BackwardStates(states.pop(), after, before, middle, middle_gradients, latent)
            differentiate_layer(batch.sweep, execution, layer, rows, observer)
            gradients += observer.finish()
            after, before = before, after
        return divergence, [*gradients, *self._at_embeddings(batch, after)]

    def batch(self, wanted: Iterable[int]) -> Batch:
        spans = [np.arange(*self.chunks.rows(chunk)) for chunk in sorted(wanted)]
        numbers = np.concatenate(spans)
        bounds = np.cumsum([0, *map(len, spans)])
        text = self.chunks
        chunks = Chunks(text.tokens[numbers], text.inputs[numbers], bounds, text.scored[numbers])
        rotate = self.network.rope.rotation(chunks.longest, self.load.device)
        sweep = Sweep(
            build=lambda number: self.network.build(self.load, number, rotate),
            device=self.load.device,
            dtype=self.load.dtype,
            chunks=chunks,
            all_experts=False,
        )
        return Batch(chunks, sweep, to_torch(numbers))

    def _embed(self, batch: Batch, states: States) -> None:
        embed(self.load, batch.chunks, states, self.network)

    def compute(self, batch: Batch, layer: int, before: States, after: States) -> None:
        middle = batch.states(self.network.hidden_size, self.load.dtype)
        execution = Execution(self.n_workers, self.advance)
        buffers = LayerBuffers(before, middle, after, batch.states(self.network.latent_cols))
        run_layer(batch.sweep, execution, layer, buffers, Silent())

    def _predictions(self, original: Original, batch: Batch, last: States) -> Predictions:
        own, here = Head.of(self.network, self.load, last), original.at(batch.numbers)
        positions = every_position(batch.chunks)
        (sums,) = log_sums([own], positions, self.n_workers)
        return Predictions(here.head, own, positions, (here.sums, to_cpu(sums)))

    def _at_end(
        self, original: Original, batch: Batch, last: States, into: States
    ) -> tuple[float, list[RowGradients]]:
        """Return the mean divergence and derivatives by the output matrix' scales; fill `into`."""
        matrix, by_slice = self.network.output, dict[int, torch.Tensor]()
        observer = ScaleGradients(self.tensors)

        def take(first: int, x: torch.Tensor, gradient: torch.Tensor) -> None:
            product = to_cpu(gradient.T @ x.to(gradient.dtype)).float()
            by_slice[first] = by_slice[first].add_(product) if first in by_slice else product

        with Workers(self.n_workers) as workers:
            found = self._predictions(original, batch, last).gradients(workers, into, take)
        if matrix in self.tensors:
            for first in sorted(by_slice):
                observer.add_rows(matrix, first, by_slice[first])
        return float(found.mean()), observer.finish()

    def _at_embeddings(self, batch: Batch, gradients: States) -> Iterator[RowGradients]:
        """Yield derivatives by the scales of the embeddings, row by row."""
        tensor = self.tensors.get(EMBEDDINGS)
        if tensor is None:
            return
        at_embeddings = self.network.at_embeddings(gradients.read(0, batch.chunks.n_tokens))
        rows, places = np.unique(batch.chunks.inputs, return_inverse=True)
        by_weight = torch.zeros((len(rows), at_embeddings.shape[1]))
        by_weight.index_add_(0, to_torch(places), at_embeddings)
        for row, each in zip(rows.tolist(), to_numpy(by_weight), strict=True):
            values = tensor.scales.by_change(tensor.stored_rows(row, row + 1), each[None])
            yield RowGradients(EMBEDDINGS, row, values)
