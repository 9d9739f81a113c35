"""One layer, over all chunks: its weights are read once.

A layer is computed in two sweeps. The first goes chunk by chunk: attention, then the dense block, or the
router and the shared experts. The second goes expert by expert: each is read, applied to the tokens of all
chunks that were routed to it, and forgotten. Three things per token stand between the sweeps: the normalised
hidden state that experts multiply (`middle`), the sum so far (`after`), and the chosen experts with weights.

Threads take chunks in the first sweep, and pieces of an expert's tokens in the second. Their results are
added up in order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch

from forward.hidden_states import States
from forward.layers.experts import Experts
from forward.layers.ffn import FeedForward
from forward.layers.norm import RMSNorm
from forward.layers.residual import PLAIN, Passage, Residual
from forward.observe import Observer
from forward.workers import Workers
from gguf_tools.errors import BadActivation

PIECE_ROWS = 1024
"""Number of tokens that an expert takes at a time: with fewer, matrix products are slower."""


class Attention(Protocol):
    """The attention of one layer, with its norm."""

    def __call__(self, hidden: torch.Tensor, observer: Observer) -> torch.Tensor:
        """Return what attention makes of one chunk's hidden states, float32 (n_tokens, hidden_size)."""
        ...

    def work(self, n_tokens: int) -> int:
        """Return about how many multiplications a token of a chunk of `n_tokens` takes."""
        ...


@dataclass(frozen=True)
class Layer:
    """One layer with its weights; those of routed experts are read when it is their turn.

    name               "blk.3", the beginning of its tensors' names
    norm               of what the block and the experts multiply
    block              what every token goes through: a dense block, or shared experts; None where there is
                       neither
    experts            routed experts, None where the layer is dense
    around_attention   how hidden states go past the attention
    around_block       how they go past block and experts together
    attention_end      what the last tensor of the attention is called in the layer
    """

    name: str
    attention: Attention
    norm: RMSNorm
    block: FeedForward | None
    experts: Experts | None
    around_attention: Residual = PLAIN
    around_block: Residual = PLAIN
    attention_end: str = "attn_output.weight"

    def attend(self, hidden: torch.Tensor, observer: Observer) -> Passage:
        """Take one chunk's hidden states through the attention; return their way past the block.

        hidden  float32 (n_tokens, n_strands * hidden_size); may be differentiated
        raises  BadActivation naming layer and tensor for NaN or infinity
        """
        passage = self.around_attention.enter(hidden, observer)
        hidden = passage.joined(self.attention(passage.x, observer))
        refuse_nonfinite(hidden, f"{self.name}.{self.attention_end}")
        return self.around_block.enter(hidden, observer)

    def chosen_by(self, tokens: torch.Tensor | None) -> torch.Tensor | None:
        """Return the experts that these tokens go to whatever their hidden states, (n_tokens, n_used).

        None where hidden states decide.
        """
        return None if self.experts is None else self.experts.router.chosen_by(tokens)

    def through(
        self, hidden: torch.Tensor, dtype: torch.dtype, observer: Observer, chosen: torch.Tensor | None = None
    ) -> Passed:
        """Return what the layer makes of one chunk's hidden states, all but the routed experts' part.

        hidden  float32 (n_tokens, n_strands * hidden_size); may be differentiated
        dtype   the type that matrices are multiplied in
        chosen  experts that have been chosen before; None: the router chooses
        raises  BadActivation naming layer and tensor for NaN or infinity
        """
        passage = self.attend(hidden, observer)
        x, hidden = self.norm(passage.x), passage.rest
        weights = None
        if self.experts is not None:
            router = self.experts.router
            observer.rows((router.name,), x)
            chosen, weights = router(x, chosen)
            weights = passage.spread(weights)
        x = x.to(dtype)
        if self.block is not None:
            hidden = passage.joined(self.block(x, observer))
            refuse_nonfinite(hidden, self.block.names.down)
        return Passed(hidden, x, chosen, weights)


@dataclass(frozen=True)
class Passed:
    """What a layer makes of a chunk before its routed experts.

    hidden   float32 (n_tokens, n_strands * hidden_size): the sum so far
    x        (n_tokens, hidden_size): what the routed experts multiply
    chosen   experts, (n_tokens, n_used); None for a layer without routed experts
    weights  what their outputs are multiplied by, of the same shape; with several strands that for each,
             (n_tokens, n_used, n_strands)
    """

    hidden: torch.Tensor
    x: torch.Tensor
    chosen: torch.Tensor | None
    weights: torch.Tensor | None


@dataclass(frozen=True)
class Sweep:
    """What stays the same for all layers.

    build        layer number -> the layer, with its weights
    device       where layers are computed
    dtype        the type that matrices are multiplied in
    chunk_size   tokens per chunk
    all_experts  show the observer every token for every expert
    advance      called with the share of a layer, 0 to 1, that has been computed since the last call
    n_workers    threads that take chunks and pieces
    elsewhere    computes layers in place of these threads; None: they do
    tokens       ids of the whole text, int64 (n_tokens,), for routers that go by them; None: no router does
    """

    build: Callable[[int], Layer]
    device: torch.device
    dtype: torch.dtype
    chunk_size: int
    all_experts: bool
    advance: Callable[[float], None]
    n_workers: int = 1
    elsewhere: Elsewhere | None = None
    tokens: torch.Tensor | None = None

    def chosen_by_token(self, layer: Layer, start: int) -> torch.Tensor | None:
        """Return the experts of a chunk's tokens where their ids decide, (chunk_size, n_used).

        None where they don't
        start  number of the chunk's first token
        """
        tokens = None if self.tokens is None else self.tokens[start : start + self.chunk_size]
        return layer.chosen_by(tokens)


class Elsewhere(Protocol):
    """Other processes that compute layers; see forward/cluster.py."""

    def run_layer(self, sweep: Sweep, number: int, before: States, after: States, observer: Observer) -> None:
        """Do what `run_layer` does, with the same numbers."""
        ...


@torch.inference_mode()
def run_layer(
    sweep: Sweep, number: int, before: States, middle: States, after: States, observer: Observer
) -> None:
    """Compute one layer from `before` into `after`, and show the observer what its matrices multiply.

    before  hidden states of all tokens; may be the same object as `middle`, and is then overwritten
    raises  BadActivation naming layer and tensor when NaN or infinity turns up
    """
    if sweep.elsewhere is not None:
        sweep.elsewhere.run_layer(sweep, number, before, after, observer)
        return
    with Workers(sweep.n_workers) as workers:
        work = _LayerRun(sweep, workers, before, middle, after, observer)
        routed = work.first_sweep(number)
        observer.refuse_nonfinite()
        if routed is not None:
            work.second_sweep(routed)
            observer.refuse_nonfinite()


@dataclass(frozen=True)
class Routes:
    """Where tokens go: experts, int64 (n_tokens, n_used), and weights, float32, see `Passed`; on the CPU."""

    experts: torch.Tensor
    weights: torch.Tensor


@dataclass(frozen=True)
class _Routed:
    """What is left to do for the second sweep.

    share  of the layer's work, 0 to 1
    """

    experts: Experts
    routes: Routes
    share: float


@dataclass(frozen=True)
class Piece:
    """Some of the tokens that an expert sees.

    tokens   their numbers, ascending
    weights  of the expert's output for each token, and for each strand where there are several; 0 where the
             observer alone is to see the token
    """

    expert: int
    tokens: torch.Tensor
    weights: torch.Tensor

    @property
    def weighted(self) -> torch.Tensor:
        """Return which of the tokens have a weight, int64."""
        has_weight = self.weights != 0
        return torch.nonzero(has_weight if has_weight.dim() == 1 else has_weight.any(1))[:, 0]


@dataclass(frozen=True)
class _Outcome:
    """What an expert makes of a piece.

    observer  has seen the piece
    weighted  which tokens of the piece have a weight
    output    of the expert for each of those, on the CPU
    """

    piece: Piece
    observer: Observer
    weighted: torch.Tensor
    output: torch.Tensor


@dataclass(frozen=True)
class _LayerRun:
    """One layer at work."""

    sweep: Sweep
    workers: Workers
    before: States
    middle: States
    after: States
    observer: Observer

    def first_sweep(self, number: int) -> _Routed | None:
        """Fill `middle`, and `after` except for the routed experts.

        Returns what is left to do, None for a dense layer. All weights but the router's are free again.
        """
        sweep, layer = self.sweep, self.sweep.build(number)

        def take_some(start: int) -> tuple[Observer, Routes | None]:
            observer = self.observer.fresh()
            hidden = self.before.read(start, start + sweep.chunk_size)
            return observer, take_chunk(sweep, layer, start, hidden, self.middle, self.after, observer)

        share = share_of_first_sweep(layer, sweep)
        n_chunks = self.before.n_rows // sweep.chunk_size
        by_chunk = []
        for observer, routes in self.workers.each(take_some, range(0, self.before.n_rows, sweep.chunk_size)):
            self.observer.merge(observer)
            if routes is not None:
                by_chunk.append(routes)
            sweep.advance(share / n_chunks)
        if layer.experts is None or not by_chunk:
            return None
        routes = Routes(
            torch.cat([routes.experts for routes in by_chunk]),
            torch.cat([routes.weights for routes in by_chunk]),
        )
        return _Routed(layer.experts, routes, 1 - share)

    def second_sweep(self, routed: _Routed) -> None:
        """Add the output of the routed experts to `after`."""
        sweep, experts = self.sweep, routed.experts

        def take_some(work: tuple[Piece, FeedForward]) -> _Outcome:
            piece, block = work
            observer = self.observer.fresh()
            weighted, output = take_piece(sweep, experts, block, piece, self.middle, observer)
            return _Outcome(piece, observer, weighted, output)

        share = routed.share / (self.middle.n_rows * experts_shown(experts, sweep))
        for outcome in self.workers.each(take_some, self._pieces(experts, routed.routes)):
            piece = outcome.piece
            self.observer.merge(outcome.observer)
            weighted = outcome.weighted
            self.after.add(piece.tokens[weighted], outcome.output, piece.weights[weighted])
            sweep.advance(share * len(piece.tokens))

    def _pieces(self, experts: Experts, routes: Routes) -> Iterator[tuple[Piece, FeedForward]]:
        """Yield all pieces of the second sweep, each with its expert."""
        for expert, block in experts.read_ahead():
            for piece in pieces_of(expert, routes, all_tokens=self.sweep.all_experts):
                yield piece, block


def take_chunk(
    sweep: Sweep,
    layer: Layer,
    start: int,
    hidden: torch.Tensor,
    middle: States,
    after: States,
    observer: Observer,
) -> Routes | None:
    """Take a chunk through a layer, all but its routed experts; return where it goes, None without experts.

    start   number of the chunk's first token
    hidden  float32 (chunk_size, n_strands * hidden_size)
    """
    routes, chosen = None, sweep.chosen_by_token(layer, start)
    passed = layer.through(hidden.to(sweep.device), sweep.dtype, observer, chosen)
    if layer.experts is not None and passed.chosen is not None and passed.weights is not None:
        routes = Routes(passed.chosen.cpu(), passed.weights.cpu())
        observer.routes(layer.experts.router.name, routes.experts)
    middle.write(start, passed.x.cpu())
    after.write(start, passed.hidden.cpu())
    return routes


def pieces_of(expert: int, routes: Routes, *, all_tokens: bool) -> Iterator[Piece]:
    """Yield the pieces of the second sweep that an expert sees.

    all_tokens  whether it is shown those, too, that do not go to it
    """
    tokens, slots = torch.nonzero(routes.experts == expert, as_tuple=True)
    weights = routes.weights[tokens, slots]
    if all_tokens:
        n_tokens = len(routes.experts)
        weights = torch.zeros((n_tokens, *weights.shape[1:])).index_copy_(0, tokens, weights)
        tokens = torch.arange(n_tokens)
    for some, theirs in zip(tokens.split(PIECE_ROWS), weights.split(PIECE_ROWS), strict=True):
        yield Piece(expert, some, theirs)


def take_piece(
    sweep: Sweep, experts: Experts, block: FeedForward, piece: Piece, middle: States, observer: Observer
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return which tokens of a piece have a weight, and what an expert makes of those, on the CPU."""
    names = experts.names
    x = middle.rows(piece.tokens).to(sweep.device, sweep.dtype)
    inner = block.inner(x, observer, piece.expert, experts.n_experts)
    observer.expert((names.gate, names.up), piece.expert, experts.n_experts, x)
    observer.expert((names.down,), piece.expert, experts.n_experts, inner)
    weighted = piece.weighted
    if len(weighted) < len(inner):
        inner = inner[weighted.to(sweep.device)]
    output = block.outer(inner, observer, piece.expert, experts.n_experts).cpu()
    refuse_nonfinite(output, f"{names.down}, expert {piece.expert}")
    return weighted, output


def experts_shown(experts: Experts, sweep: Sweep) -> int:
    """Return how many experts are shown each token."""
    return experts.n_experts if sweep.all_experts else experts.router.routing.n_used


def share_of_first_sweep(layer: Layer, sweep: Sweep) -> float:
    """Return about how much of a layer's work the first sweep is, 0 to 1."""
    if layer.experts is None:
        return 1.0
    block = 0 if layer.block is None else layer.block.work
    first = layer.attention.work(sweep.chunk_size) + block
    second = layer.experts.work * experts_shown(layer.experts, sweep)
    return first / (first + second)


def refuse_nonfinite(states: torch.Tensor, name: str, which: str = "hidden states after it") -> None:
    """Raise BadActivation naming the tensor that the hidden states, or other states of tokens, come from."""
    # A sum has NaN or infinity when a state has, and takes one pass.
    if not bool(torch.isfinite(states.sum())):
        raise BadActivation(f"{name}: the {which} have NaN or infinity")
