"""One layer, differentiated over all chunks: gradients at its output become gradients at its input.

Nothing of the forward pass is kept but the hidden states before the layer. The layer is computed again and
differentiated in three sweeps, so memory is one layer without its experts, and an expert or two:

    recompute   chunk by chunk, attention and router: what the experts multiply, and where tokens go
    experts     expert by expert: each is applied to its tokens and differentiated. Gradients at what it
                multiplied are added up by token, those at the routing weights are kept
    chunks      chunk by chunk: all the rest is computed and differentiated, and what the experts gave back
                goes in at its place

The outputs of latent experts are added up before they are differentiated: the norm and the matrix behind the
sum need it. So `above` is a sweep of its own, and the experts are computed twice.

A dense layer needs the last sweep only. Which experts a token goes to is a constant; the gradient flows
through the weights of those that were chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch

from imatrix.forward.device import to_cpu, to_numpy
from imatrix.forward.hidden_states import States, clear, write_first
from imatrix.forward.layer import Layer, refuse_nonfinite
from imatrix.forward.layers.experts import Experts
from imatrix.forward.layers.ffn import FeedForward
from imatrix.forward.observe import Observer, ObservesGradients, Silent
from imatrix.forward.sweep import PIECE_ROWS, Execution, Routes, Sweep
from imatrix.forward.workers import Workers
from imatrix.texts.chunks import Chunks

_BACKWARD = 3
"""Work of differentiating a product, over that of computing it: the product itself, and about twice as much
again."""


@dataclass(frozen=True)
class BackwardStates:
    """Values of each token while a layer is differentiated.

    Hidden states and their gradients have (n_tokens, n_strands * hidden_size), the scratch has (n_tokens,
    hidden_size).

    before            hidden states before the layer, float32
    after_gradients   gradients at the hidden states after it, float32
    before_gradients  where gradients at the hidden states before it go, float32; not `after_gradients`
    middle            scratch in the type that matrices are multiplied in
    middle_gradients  scratch, float32
    latent            scratch for sums of the outputs of latent experts, and for gradients at them; None for a
                      model that has none
    """

    before: States
    after_gradients: States
    before_gradients: States
    middle: States
    middle_gradients: States
    latent: States | None = None


def differentiate_layer(
    sweep: Sweep,
    execution: Execution,
    number: int,
    states: BackwardStates,
    observer: Observer,
    at_once: int | None = None,
) -> None:
    """Differentiate one layer, and show the observer the gradients at its products.

    observer  an `ObservesGradients`, too, if it wants gradients. Each task works with one made by `fresh`
              when its turn comes in the order of tasks, and they are merged in that order
    at_once   chunks in memory, at most; None: as many as threads can use
    raises    BadActivation naming layer and tensor for NaN or infinity
    """
    with Workers(execution.n_workers) as workers, torch.no_grad():
        layer = sweep.build(number)
        again, of_experts, of_chunks = _shares(layer, sweep)
        work = _Backward(sweep, workers, execution.advance, layer, states, observer)
        routes = at_weights = None
        if layer.experts is not None:
            routes = work.recompute(again)
            above = work.above(layer.experts, routes)
            at_weights = work.through_experts(layer.experts, routes, above, of_experts)
            observer.refuse_nonfinite()
        work.through_chunks(routes, at_weights, at_once, of_chunks)
        # An observer knows best where a number went wrong, so it is asked first.
        observer.refuse_nonfinite()
        work.refuse_nonfinite()


@dataclass(frozen=True)
class _Piece:
    """Some of the tokens that go to an expert: their ascending numbers, and the place of the expert among
    those that each goes to."""

    expert: int
    block: FeedForward
    tokens: torch.Tensor
    slots: torch.Tensor


@dataclass(frozen=True)
class _Backward:
    """One layer at work."""

    sweep: Sweep
    workers: Workers
    advance: Callable[[float], None]
    layer: Layer
    states: BackwardStates
    observer: Observer

    def recompute(self, share: float) -> Routes:
        """Fill `middle`, and return where tokens go; `share` is that of the layer's work, here and below."""
        states, sweep = self.states, self.sweep
        layer = replace(self.layer, block=None)

        def take_chunk(chunk: int) -> Routes:
            start, stop = sweep.chunks.rows(chunk)
            hidden = states.before.read(start, stop).to(sweep.device)
            hidden = layer.enter(hidden, sweep.tokens(chunk), Silent())
            passed = layer.forward(hidden, sweep.dtype, Silent(), sweep.chosen_by_token(layer, chunk))
            assert passed.chosen is not None
            assert passed.weights is not None
            write_first(states.middle, start, to_cpu(passed.x))
            return Routes(to_cpu(passed.chosen), to_cpu(passed.weights))

        by_chunk = []
        for routes in self.workers.each(take_chunk, self._chunks):
            by_chunk.append(routes)
            self.advance(share / len(self._chunks))
        return Routes.joined(by_chunk)

    def above(self, experts: Experts, routes: Routes) -> States:
        """Return the gradients at the sum of the experts' outputs."""
        latent, sums, sweep = experts.latent, self.states.latent, self.sweep
        if latent is None:
            return self.states.after_gradients
        assert sums is not None
        clear(sums)

        def take_piece(piece: _Piece) -> tuple[_Piece, torch.Tensor]:
            return piece, to_cpu(piece.block(self._middle(experts, piece.tokens), Silent()))

        for piece, output in self.workers.each(take_piece, _pieces(experts, routes, sweep.chunks)):
            sums.add(piece.tokens, output, routes.weights[piece.tokens, piece.slots])

        def take_chunk(task: tuple[int, Observer]) -> Observer:
            chunk, observer = task
            rows = slice(*sweep.chunks.rows(chunk))
            _tell_tokens(observer, torch.arange(rows.start, rows.stop))
            # A copy: gradients of other chunks are written beside it meanwhile.
            summed = sums.read(rows.start, rows.stop).clone().to(sweep.device).requires_grad_()
            output = latent.leave(summed, observer)
            after = self.states.after_gradients.read(rows.start, rows.stop)[:, : output.shape[1]]
            (gradient,) = torch.autograd.grad(output, summed, after.to(sweep.device))
            sums.write(rows.start, to_cpu(gradient))
            return observer

        tasks = ((chunk, self.observer.fresh()) for chunk in self._chunks)
        for observer in self.workers.each(take_chunk, tasks, gradients=True):
            self.observer.merge(observer)
        return sums

    def _middle(self, experts: Experts, tokens: torch.Tensor) -> torch.Tensor:
        """Return the inputs of experts."""
        return self.states.middle.rows(tokens)[:, : experts.n_cols].to(self.sweep.device, self.sweep.dtype)

    def through_experts(self, experts: Experts, routes: Routes, sums: States, share: float) -> torch.Tensor:
        """Fill `middle_gradients`, and return the gradients at the weights, of their shape.

        sums  gradients at the sum of the experts' outputs
        """
        states, sweep = self.states, self.sweep
        clear(states.middle_gradients)

        def take_piece(
            task: tuple[_Piece, Observer],
        ) -> tuple[_Piece, Observer, torch.Tensor, torch.Tensor]:
            piece, observer = task
            _tell_tokens(observer, piece.tokens)
            place = piece.expert, experts.n_experts
            x = self._middle(experts, piece.tokens).requires_grad_()
            above = sums.rows(piece.tokens).to(sweep.device)
            weights = routes.weights[piece.tokens, piece.slots].to(sweep.device)
            inputs, weighed = x, experts.router.routing.weighs_inputs
            if weighed:
                inputs = (x * weights.requires_grad_()[:, None]).to(x.dtype)
            output = piece.block.project_down(piece.block.gate_up(inputs, observer, *place), observer, *place)
            if weighed:
                at_output = above[:, : output.shape[1]].to(output.dtype)
                at_x, at_weights = torch.autograd.grad(output, (x, weights), at_output)
            else:
                at_weights, at_output = _weighted_back(output.detach().float(), above, weights)
                (at_x,) = torch.autograd.grad(output, x, at_output.to(output.dtype))
            return piece, observer, to_cpu(at_x), to_cpu(at_weights)

        gradients = torch.zeros_like(routes.weights)
        pieces = _pieces(experts, routes, sweep.chunks)
        tasks = ((piece, self.observer.fresh()) for piece in pieces)
        for piece, observer, at_x, at_weights in self.workers.each(take_piece, tasks, gradients=True):
            self.observer.merge(observer)
            states.middle_gradients.add(piece.tokens, at_x, torch.ones(len(piece.tokens)))
            gradients[piece.tokens, piece.slots] = at_weights
            self.advance(share * len(piece.tokens) / routes.experts.numel())
        return gradients

    def through_chunks(
        self, routes: Routes | None, at_weights: torch.Tensor | None, at_once: int | None, share: float
    ) -> None:
        """Fill `before_gradients`.

        routes      where tokens go; None for a layer without routed experts
        at_weights  the gradients at the weights of the experts that they go to, as these in shape
        """
        states, sweep, layer = self.states, self.sweep, self.layer

        def take_chunk(task: tuple[int, Observer]) -> Observer:
            chunk, observer = task
            rows = slice(*sweep.chunks.rows(chunk))
            _tell_tokens(observer, torch.arange(rows.start, rows.stop))

            def here(values: States) -> torch.Tensor:
                return values.read(rows.start, rows.stop).to(sweep.device)

            hidden = here(states.before).detach().requires_grad_()
            chosen = None if routes is None else routes.experts[rows].to(sweep.device)
            entered = layer.enter(hidden, sweep.tokens(chunk), observer)
            passed = layer.forward(entered, sweep.dtype, observer, chosen)
            values, gradients = [passed.hidden], [here(states.after_gradients)]
            if at_weights is not None and passed.weights is not None:
                values += [passed.x, passed.weights]
                at_x = here(states.middle_gradients)[:, : passed.x.shape[1]]
                gradients += [at_x.to(passed.x.dtype)]
                gradients += [at_weights[rows].to(sweep.device)]
            (gradient,) = torch.autograd.grad(values, hidden, gradients)
            states.before_gradients.write(rows.start, to_cpu(gradient))
            return observer

        tasks = ((chunk, self.observer.fresh()) for chunk in self._chunks)
        for observer in self.workers.each(take_chunk, tasks, gradients=True, at_once=at_once):
            self.observer.merge(observer)
            self.advance(share / len(self._chunks))

    def refuse_nonfinite(self) -> None:
        """Raise BadActivation for NaN or infinity in the gradients before the layer."""
        for chunk in self._chunks:
            gradients = self.states.before_gradients.read(*self.sweep.chunks.rows(chunk))
            refuse_nonfinite(gradients, f"{self.layer.name}.attn_norm.weight", "gradients before it")

    @property
    def _chunks(self) -> range:
        return range(self.sweep.chunks.n_chunks)


def _weighted_back(
    output: torch.Tensor, above: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients at the weights of an expert's output, and at the output.

    output   (n_tokens, hidden_size)
    above    gradients at the hidden states that it is added to, (n_tokens, n_strands * hidden_size)
    weights  (n_tokens,), or (n_tokens, n_strands)
    """
    if weights.dim() == 1:
        above = above[:, : output.shape[1]]
        return (output * above).sum(-1), above * weights[:, None]
    n_strands, n_cols = weights.shape[1], output.shape[1]
    strands = above[:, : n_strands * n_cols].unflatten(-1, (n_strands, n_cols))
    return (output[:, None] * strands).sum(-1), (strands * weights[:, :, None]).sum(1)


def _tell_tokens(observer: Observer, numbers: torch.Tensor) -> None:
    if isinstance(observer, ObservesGradients):
        observer.tokens(numbers)


def _pieces(experts: Experts, routes: Routes, chunks: Chunks) -> Iterator[_Piece]:
    """Yield the pieces of all experts, expert by expert; a chunk is not cut unless it is too large."""
    for expert, block in experts.read_ahead():
        tokens, slots = torch.nonzero(routes.experts == expert, as_tuple=True)
        by_chunk = np.bincount(chunks.chunk_of(to_numpy(tokens))).tolist()
        sizes = list(_grouped(by_chunk, PIECE_ROWS))
        for some, theirs in zip(tokens.split(sizes), slots.split(sizes), strict=True):
            yield _Piece(expert, block, some, theirs)


def _grouped(sizes: Iterable[int], most: int) -> Iterator[int]:
    """Yield sums of neighbouring sizes, none above `most`; only a size above it is cut.

    >>> list(_grouped([3, 4, 0, 2, 25], 10))
    [9, 10, 10, 5]
    """
    held = 0
    for size in sizes:
        if held and held + size > most:
            yield held
            held = 0
        held += size
        while held > most:
            yield most
            held -= most
    if held:
        yield held


def _shares(layer: Layer, sweep: Sweep) -> tuple[float, float, float]:
    """Estimate how the layer's work is divided: computing it again, experts, chunks. The sum is one."""
    attention = layer.attention.work(sweep.chunks.n_tokens // sweep.chunks.n_chunks)
    chunks = _BACKWARD * (attention + (0 if layer.block is None else layer.block.work))
    if layer.experts is None:
        return 0, 0, 1
    experts = _BACKWARD * layer.experts.work * layer.experts.router.routing.n_used
    total = attention + chunks + experts
    return attention / total, experts / total, chunks / total
