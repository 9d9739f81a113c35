"""One layer, over all chunks: its weights are read once.

Two sweeps. The first goes chunk by chunk: attention, then the dense block, or router and shared experts.
The second goes expert by expert: each is read, applied to the tokens of all chunks that were routed
to it, and forgotten. Between them stand, per token, the normalised hidden state that experts multiply
(`middle`), the sum so far (`after`), and who goes where with which weight.

Threads take chunks, and pieces of an expert's tokens. What they give is added up in order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch.nn.functional import linear

from gguf_tools.errors import BadImportance
from imatrix.accumulate import Accumulator
from forward.kernels import sums_of_squares
from forward.attention.mla import load_attention
from forward.ffn import FeedForward, load_expert, load_ffn, names_of
from forward.load import Loader
from forward.norm import rms_norm
from forward.rope import Rotation
from forward.experts import load_router
from forward.hidden_states import States
from forward.workers import Workers

_PIECE_ROWS = 1024
"""How many tokens an expert takes at a time: with fewer, matrix products are slower."""


@dataclass(frozen=True)
class Sweep:
    """What stays the same for all layers.

    load         reads weights
    chunk_size   tokens per chunk
    rotate       of the positions of a chunk
    all_experts  show every token to every expert, for the sums only
    advance      called with the share of a layer, 0 to 1, that has been computed since the last call
    n_workers    threads that take chunks and pieces
    """

    load: Loader
    chunk_size: int
    rotate: Rotation
    all_experts: bool
    advance: Callable[[float], None]
    n_workers: int = 1


@torch.inference_mode()
def run_layer(sweep: Sweep, layer: int, before: States, middle: States, after: States) -> Accumulator:
    """Compute one layer from `before` into `after`, and return what its matrices have seen.

    before  hidden states of all tokens; may be the same object as `middle`, and is then overwritten
    raises  BadImportance naming layer and tensor when NaN or infinity turns up
    """
    with Workers(sweep.n_workers) as workers:
        work = _Layer(sweep, workers, layer, before, middle, after, Accumulator())
        routes = work.first_sweep()
        work.seen.refuse_nonfinite()
        if routes is not None:
            work.second_sweep(routes)
            work.seen.refuse_nonfinite()
    return work.seen


@dataclass(frozen=True)
class _Routes:
    """experts, weights: (n_tokens, n_chosen), on the CPU"""

    experts: torch.Tensor
    weights: torch.Tensor


@dataclass(frozen=True)
class _Piece:
    """Some of the tokens that an expert sees.

    tokens   their numbers, ascending
    weights  of the expert's output for each; 0 where it is only shown the token
    """

    expert: int
    block: FeedForward
    tokens: torch.Tensor
    weights: torch.Tensor


@dataclass(frozen=True)
class _Outcome:
    """What an expert makes of a piece, on the CPU.

    sums_in, sums_inner  sums of squares of what gate and up, and what down multiplies, float64 (n_cols,)
    routed               which tokens of the piece have a weight
    output               of the expert for each of those
    """

    piece: _Piece
    sums_in: torch.Tensor
    sums_inner: torch.Tensor
    routed: torch.Tensor
    output: torch.Tensor


@dataclass(frozen=True)
class _Layer:
    """One layer at work."""

    sweep: Sweep
    workers: Workers
    number: int
    before: States
    middle: States
    after: States
    seen: Accumulator

    def first_sweep(self) -> _Routes | None:
        """Fill `middle`, and `after` but for the routed experts; return the routes if the layer has any."""
        load, config, chunk_size = self.sweep.load, self.sweep.load.model.config, self.sweep.chunk_size
        is_dense = self.number < config.first_k_dense_replace
        attention = load_attention(load, self.number)
        norm = load.float32(f"blk.{self.number}.ffn_norm.weight", config.hidden_size)
        router = None if is_dense else load_router(load, self.number)
        block, names = _block_of_all_tokens(load, self.number, is_dense)

        def take_chunk(start: int) -> tuple[Accumulator, _Routes | None]:
            seen, routes = Accumulator(), None
            hidden = self.before.read(start, start + chunk_size).to(load.device)
            hidden = attention(hidden, self.sweep.rotate, seen).add_(hidden)
            _refuse_nonfinite(hidden, f"blk.{self.number}.attn_output.weight")
            x = rms_norm(hidden, norm, config.rms_norm_eps)
            if router is not None:
                seen.add((f"blk.{self.number}.ffn_gate_inp.weight",), x)
                experts, weights = router(x)
                routes = _Routes(experts.cpu(), weights.cpu())
            x = x.to(load.dtype)
            if block is not None:
                hidden += block.observed(x, names, seen)
                _refuse_nonfinite(hidden, names[2])
            self.middle.write(start, x.cpu())
            self.after.write(start, hidden.cpu())
            return seen, routes

        share = _chunks_share(self.sweep, is_dense) / (self.before.n_rows // chunk_size)
        found = []
        for seen, routes in self.workers.each(take_chunk, range(0, self.before.n_rows, chunk_size)):
            self.seen.merge(seen)
            if routes is not None:
                found.append(routes)
            self.sweep.advance(share)
        if not found:
            return None
        return _Routes(torch.cat([r.experts for r in found]), torch.cat([r.weights for r in found]))

    def second_sweep(self, routes: _Routes) -> None:
        """Add what the routed experts give to `after`."""
        load, config = self.sweep.load, self.sweep.load.model.config
        n_experts = config.n_routed_experts
        gate, up, down = names_of(self.number, "_exps")

        def take_piece(piece: _Piece) -> _Outcome:
            x = self.middle.rows(piece.tokens).to(load.device, load.dtype)
            inner = piece.block.inner(x)
            sums_in, sums_inner = sums_of_squares(x[None])[0], sums_of_squares(inner[None])[0]
            routed = torch.nonzero(piece.weights)[:, 0]
            if len(routed) < len(inner):
                inner = inner[routed.to(load.device)]
            output = linear(inner, piece.block.down).cpu()
            _refuse_nonfinite(output, f"{down}, expert {piece.expert}")
            return _Outcome(piece, sums_in, sums_inner, routed, output)

        n_seen = n_experts if self.sweep.all_experts else config.num_experts_per_tok
        share = (1 - _chunks_share(self.sweep, is_dense=False)) / (self.middle.n_rows * n_seen)
        for done in self.workers.each(take_piece, self._pieces(routes)):
            piece, count = done.piece, len(done.piece.tokens)
            for name, sums in ((gate, done.sums_in), (up, done.sums_in), (down, done.sums_inner)):
                self.seen.add_expert(name, piece.expert, n_experts, sums, count)
            self.after.add(piece.tokens[done.routed], done.output, piece.weights[done.routed])
            self.sweep.advance(share * count)

    def _pieces(self, routes: _Routes) -> Iterator[_Piece]:
        """Yield all that the second sweep has to do, expert by expert."""
        n_experts, n_tokens = self.sweep.load.model.config.n_routed_experts, len(routes.experts)
        for expert, block in _experts_ahead(self.sweep.load, self.number, n_experts):
            tokens, slots = torch.nonzero(routes.experts == expert, as_tuple=True)
            weights = routes.weights[tokens, slots]
            if self.sweep.all_experts:
                weights = torch.zeros(n_tokens).index_copy_(0, tokens, weights)
                tokens = torch.arange(n_tokens)
            for some, theirs in zip(tokens.split(_PIECE_ROWS), weights.split(_PIECE_ROWS), strict=True):
                yield _Piece(expert, block, some, theirs)


def _block_of_all_tokens(
    load: Loader, layer: int, is_dense: bool
) -> tuple[FeedForward | None, tuple[str, str, str]]:
    """Return the dense block or the shared experts, whichever the layer has."""
    config = load.model.config
    names = names_of(layer, "" if is_dense else "_shexp")
    width = config.intermediate_size if is_dense else config.shared_intermediate_size
    return (load_ffn(load, names, width) if width else None), names


def _chunks_share(sweep: Sweep, is_dense: bool) -> float:
    """Return about how much of a layer's work the first sweep is."""
    config = sweep.load.model.config
    if is_dense:
        return 1.0
    n_experts = config.n_routed_experts if sweep.all_experts else config.num_experts_per_tok
    routed = 3 * n_experts * config.moe_intermediate_size * config.hidden_size
    latent = config.kv_lora_rank * config.num_attention_heads
    attended = latent * (config.qk_nope_head_dim + config.v_head_dim + sweep.chunk_size)
    projected = config.hidden_size * (config.attention_cols + config.q_rows // 2)
    shared = 3 * config.shared_intermediate_size * config.hidden_size
    rest = attended + projected + shared
    return rest / (rest + routed)


def _experts_ahead(load: Loader, layer: int, n_experts: int) -> Iterator[tuple[int, FeedForward]]:
    """Yield every expert; the next one is read meanwhile."""
    with ThreadPoolExecutor(1) as reader:
        coming = reader.submit(load_expert, load, layer, 0)
        for expert in range(n_experts):
            block = coming.result()
            if expert + 1 < n_experts:
                coming = reader.submit(load_expert, load, layer, expert + 1)
            yield expert, block
            del block


def _refuse_nonfinite(states: torch.Tensor, after: str) -> None:
    # A sum has NaN or infinity when a state has, and is one pass over them.
    if not bool(torch.isfinite(states.sum())):
        raise BadImportance(f"{after}: the hidden states after it have NaN or infinity")
