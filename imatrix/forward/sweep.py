"""All layers' two sweeps over the chunks of a text: a layer's weights are read once.

The first sweep goes chunk by chunk: attention, then the dense block, or the router and the shared experts.
The second goes expert by expert: each is read, applied to the tokens of all chunks that were routed to it,
and forgotten. Three things per token stand between the sweeps: the normalised hidden state that experts
multiply (`middle`), the sum so far (`after`), and the chosen experts with weights. The outputs of latent
experts are added up apart (`latent`), and a third sweep, chunk by chunk, adds what becomes of their sums.

The tasks, chunks in the first sweep and pieces of an expert's tokens in the second, are dealt out to threads,
or to the workers of a cluster (imatrix/forward/cluster.py). Their results are added up in order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Protocol, Self

import torch

from imatrix.forward.device import to_cpu, to_torch
from imatrix.forward.hidden_states import States, clear, write_first
from imatrix.forward.layer import Layer, refuse_nonfinite
from imatrix.forward.layers.experts import Experts, Routing
from imatrix.forward.layers.ffn import FeedForward
from imatrix.forward.layers.latent_experts import LatentColumns
from imatrix.forward.layers.residual import joined
from imatrix.forward.observe import Observer
from imatrix.forward.workers import Workers
from imatrix.texts.chunks import Chunks

PIECE_ROWS = 1024
"""Number of tokens that an expert takes at a time: with fewer, matrix products are slower."""


@dataclass(frozen=True)
class Sweep:
    """Computation of a model's layers over the chunks of a text.

    build        layer number -> the layer, with its weights
    device       where layers are computed
    dtype        the type that matrices are multiplied in
    chunks       of the text
    all_experts  show the observer every token for every expert
    """

    build: Callable[[int], Layer]
    device: torch.device
    dtype: torch.dtype
    chunks: Chunks
    all_experts: bool

    def tokens(self, chunk: int) -> torch.Tensor:
        """Return the tokens of a chunk, int64 (n_tokens,)."""
        start, stop = self.chunks.rows(chunk)
        return to_torch(self.chunks.inputs[start:stop])

    def chosen_by_token(self, layer: Layer, chunk: int) -> torch.Tensor | None:
        """Return the experts of a chunk's tokens where their ids decide, (n_tokens, n_used); else None."""
        return layer.chosen_by(self.tokens(chunk))


@dataclass(frozen=True)
class Execution:
    """How to compute it, and who is told how far it has come.

    n_workers  threads that take chunks and pieces
    advance    called with the share of a layer, 0 to 1, that has been computed since the last call
    cluster    has layers computed in place of these threads; None: they do
    """

    n_workers: int = 1
    advance: Callable[[float], None] = lambda share: None
    cluster: LayerCluster | None = None


@dataclass(frozen=True)
class LayerBuffers:
    """Rows of all tokens that one layer reads and writes.

    before  its input, float32; may be the same object as `middle`, and is then overwritten
    middle  what experts multiply, in the type that matrices are multiplied in; of latent experts in the first
            columns
    after   its output, float32
    latent  sums of the outputs of latent experts, float32; None for a model that has none
    """

    before: States
    middle: States
    after: States
    latent: States | None = None


@dataclass(frozen=True)
class Routes:
    """Where tokens go: experts, int64 (n_tokens, n_used), and weights, float32, see `Passed`; on the CPU."""

    experts: torch.Tensor
    weights: torch.Tensor

    @classmethod
    def joined(cls, by_chunk: Sequence[Routes]) -> Self:
        """Return the routes of all chunks, one after the other."""
        experts = torch.cat([routes.experts for routes in by_chunk])
        return cls(experts, torch.cat([routes.weights for routes in by_chunk]))


@dataclass(frozen=True)
class Piece:
    """Some of the tokens that an expert sees.

    tokens   their numbers, ascending
    weights  of the expert's output for each token, and for each strand where there are several; 0 where the
             observer alone is to see the token
    factors  what the expert's inputs are multiplied by, float32 (n_tokens,); None for nothing
    """

    expert: int
    tokens: torch.Tensor
    weights: torch.Tensor
    factors: torch.Tensor | None = None

    @property
    def weighted(self) -> torch.Tensor:
        """Indices of the tokens that have a weight, int64."""
        has_weight = self.weights != 0
        return torch.nonzero(has_weight if has_weight.dim() == 1 else has_weight.any(1))[:, 0]


TakeRoutes = Callable[[Routes | None], None]
"""Is told where the tokens of a chunk go; None for a dense layer."""

TakeOutput = Callable[[Piece, torch.Tensor], None]
"""Is given a piece, and the expert's output for those of its tokens that have a weight."""


class Dealer(Protocol):
    """Has the tasks of one layer computed.

    Each task shows what it multiplies to an observer made by `fresh`. These are merged into the layer's, and
    results are handed on, in the order of the tasks.
    """

    def chunks(self, layer: Layer, observer: Observer, take: TakeRoutes) -> None:
        """Fill `middle`, and `after` except for the routed experts; `take` is called after every chunk."""

    def pieces(self, experts: Experts, routes: Routes, observer: Observer, take: TakeOutput) -> None:
        """Apply the experts to the pieces of their tokens; `take` is called with every output."""


class LayerCluster(Protocol):
    """Processes of a cluster that compute layers; see imatrix/forward/cluster.py."""

    def dealer(self, sweep: Sweep, number: int, states: LayerBuffers) -> AbstractContextManager[Dealer]:
        """Give what deals out the tasks of a layer, with the same numbers as those of threads."""


@torch.inference_mode()
def run_layer(
    sweep: Sweep, execution: Execution, number: int, states: LayerBuffers, observer: Observer
) -> None:
    """Compute one layer from `before` into `after`, and show the observer what its matrices multiply.

    raises  BadActivation naming layer and tensor when NaN or infinity turns up
    """
    with _dealer(sweep, execution, number, states) as dealer:
        layer = sweep.build(number)
        experts = layer.experts
        share, n_chunks = _share_of_first_sweep(layer, sweep), sweep.chunks.n_chunks
        by_chunk: list[Routes] = []

        def take_routes(routes: Routes | None) -> None:
            if routes is not None:
                by_chunk.append(routes)
            execution.advance(share / n_chunks)

        dealer.chunks(layer, observer, take_routes)
        observer.refuse_nonfinite()
        if experts is None or not by_chunk:
            return
        del layer  # of its weights, only the router's are still wanted
        share_of_token = (1 - share) / (states.middle.n_rows * _experts_shown(experts, sweep))
        sums = states.after
        if experts.latent is not None:
            assert states.latent is not None
            sums = states.latent
            clear(sums)

        def add_output(piece: Piece, output: torch.Tensor) -> None:
            weighted = piece.weighted
            sums.add(piece.tokens[weighted], output, piece.weights[weighted])
            execution.advance(share_of_token * len(piece.tokens))

        routes = Routes.joined(by_chunk)
        by_chunk.clear()
        dealer.pieces(experts, routes, observer, add_output)
        observer.refuse_nonfinite()
    if experts.latent is not None:
        _add_latent(sweep, execution, experts.latent, sums, states.after, observer)
        observer.refuse_nonfinite()


def _add_latent(
    sweep: Sweep,
    execution: Execution,
    latent: LatentColumns,
    sums: States,
    after: States,
    observer: Observer,
) -> None:
    """Add what becomes of the sums of latent experts to `after`."""

    def take_chunk(chunk: int) -> Observer:
        seen, (start, stop) = observer.fresh(), sweep.chunks.rows(chunk)
        output = to_cpu(latent.leave(sums.read(start, stop).to(sweep.device), seen))
        refuse_nonfinite(output, latent.up.name)
        after.write(start, joined(after.read(start, stop), output, None))
        return seen

    with Workers(execution.n_workers) as workers:
        for seen in workers.each(take_chunk, range(sweep.chunks.n_chunks)):
            observer.merge(seen)


@dataclass(frozen=True)
class _ThreadDealer:
    """A Dealer for threads of this process."""

    sweep: Sweep
    workers: Workers
    states: LayerBuffers

    def chunks(self, layer: Layer, observer: Observer, take: TakeRoutes) -> None:
        sweep, states = self.sweep, self.states

        def take_some(chunk: int) -> tuple[Observer, Routes | None]:
            seen = observer.fresh()
            hidden = states.before.read(*sweep.chunks.rows(chunk))
            return seen, take_chunk(sweep, layer, chunk, hidden, states.middle, states.after, seen)

        for seen, routes in self.workers.each(take_some, range(sweep.chunks.n_chunks)):
            observer.merge(seen)
            take(routes)

    def pieces(self, experts: Experts, routes: Routes, observer: Observer, take: TakeOutput) -> None:
        def take_some(work: tuple[Piece, FeedForward]) -> tuple[Piece, Observer, torch.Tensor]:
            piece, block = work
            seen = observer.fresh()
            return piece, seen, take_piece(self.sweep, experts, block, piece, self.states.middle, seen)

        for piece, seen, output in self.workers.each(take_some, self._with_experts(experts, routes)):
            observer.merge(seen)
            take(piece, output)

    def _with_experts(self, experts: Experts, routes: Routes) -> Iterator[tuple[Piece, FeedForward]]:
        """Yield all pieces of the second sweep, each with its expert."""
        for expert, block in experts.read_ahead():
            for piece in pieces_of(self.sweep, experts.router.routing, expert, routes):
                yield piece, block


@contextmanager
def _dealer(sweep: Sweep, execution: Execution, number: int, states: LayerBuffers) -> Iterator[Dealer]:
    if execution.cluster is not None:
        with execution.cluster.dealer(sweep, number, states) as dealer:
            yield dealer
    else:
        with Workers(execution.n_workers) as workers:
            yield _ThreadDealer(sweep, workers, states)


def take_chunk(
    sweep: Sweep,
    layer: Layer,
    chunk: int,
    hidden: torch.Tensor,
    middle: States,
    after: States,
    observer: Observer,
) -> Routes | None:
    """Take a chunk through a layer, all but its routed experts; return where it goes, None without experts.

    chunk   its number
    hidden  float32 (n_tokens, n_strands * hidden_size)
    """
    routes, chosen = None, sweep.chosen_by_token(layer, chunk)
    entered = layer.enter(hidden.to(sweep.device), sweep.tokens(chunk), observer)
    passed = layer.forward(entered, sweep.dtype, observer, chosen)
    if layer.experts is not None and passed.chosen is not None and passed.weights is not None:
        routes = Routes(to_cpu(passed.chosen), to_cpu(passed.weights))
        observer.routes(layer.experts.router.name, routes.experts)
    start, _ = sweep.chunks.rows(chunk)
    write_first(middle, start, to_cpu(passed.x))
    after.write(start, to_cpu(passed.hidden))
    return routes


def pieces_of(sweep: Sweep, routing: Routing, expert: int, routes: Routes) -> Iterator[Piece]:
    """Yield the pieces of the second sweep that an expert sees.

    A piece has tokens of one part of the text: products of other pieces round differently.
    """
    tokens, slots = torch.nonzero(routes.experts == expert, as_tuple=True)
    weights = routes.weights[tokens, slots]
    if sweep.all_experts:
        n_tokens = len(routes.experts)
        weights = torch.zeros((n_tokens, *weights.shape[1:])).index_copy_(0, tokens, weights)
        tokens = torch.arange(n_tokens)
    sizes = torch.searchsorted(tokens, to_torch(sweep.chunks.part_bounds)).diff().tolist()
    for of_part, theirs in zip(tokens.split(sizes), weights.split(sizes), strict=True):
        for some, their in zip(of_part.split(PIECE_ROWS), theirs.split(PIECE_ROWS), strict=True):
            piece = Piece(expert, some, their)
            yield _with_factors(piece) if routing.weighs_inputs else piece


def _with_factors(piece: Piece) -> Piece:
    """Return a piece whose weights are factors of the input; a token without a weight stays as it is."""
    has_weight = piece.weights != 0
    return replace(
        piece, weights=has_weight.float(), factors=torch.where(has_weight, piece.weights, torch.ones(()))
    )


def take_piece(
    sweep: Sweep, experts: Experts, block: FeedForward, piece: Piece, middle: States, observer: Observer
) -> torch.Tensor:
    """Apply an expert to a piece; return its output for the tokens that have a weight, on the CPU."""
    names = experts.names
    x = middle.rows(piece.tokens)[:, : experts.n_cols].to(sweep.device, sweep.dtype)
    if piece.factors is not None:
        x = (x * piece.factors[:, None].to(sweep.device)).to(sweep.dtype)
    inner = block.gate_up(x, observer, piece.expert, experts.n_experts)
    observer.expert(names.inputs, piece.expert, experts.n_experts, x)
    observer.expert((names.down,), piece.expert, experts.n_experts, inner)
    weighted = piece.weighted
    if len(weighted) < len(inner):
        inner = inner[weighted.to(sweep.device)]
    output = to_cpu(block.project_down(inner, observer, piece.expert, experts.n_experts))
    refuse_nonfinite(output, f"{names.down}, expert {piece.expert}")
    return output


def _experts_shown(experts: Experts, sweep: Sweep) -> int:
    """Number of experts that are shown each token."""
    return experts.n_experts if sweep.all_experts else experts.router.routing.n_used


def _share_of_first_sweep(layer: Layer, sweep: Sweep) -> float:
    """Estimate the first sweep's share of a layer's work, 0 to 1."""
    if layer.experts is None:
        return 1.0
    block = 0 if layer.block is None else layer.block.work
    first = layer.attention.work(sweep.chunks.n_tokens // sweep.chunks.n_chunks) + block
    second = layer.experts.work * _experts_shown(layer.experts, sweep)
    return first / (first + second)
