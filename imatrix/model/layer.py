"""One layer, over all chunks: its weights are read once.

Two sweeps. The first goes chunk by chunk: attention, then the dense block, or router and shared experts.
The second goes expert by expert: each is read, applied to the tokens of all chunks that were routed
to it, and forgotten. Between them stand, per token, the normalised hidden state that experts multiply
(`middle`), the sum so far (`after`), and who goes where with which weight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch.nn.functional import linear

from gguf_tools.errors import BadImportance
from imatrix.accumulate import Accumulator, sums_of_squares
from imatrix.model.attention import load_attention
from imatrix.model.ffn import FeedForward, load_expert, load_ffn, names_of
from imatrix.model.load import Loader
from imatrix.model.norm import rms_norm
from imatrix.model.rope import Rotation
from imatrix.model.routing import load_router
from imatrix.states import States

_EXPERT_ROWS = 4096
"""How many tokens an expert takes at a time."""


@dataclass(frozen=True)
class Sweep:
    """What stays the same for all layers.

    load         reads weights
    chunk_size   tokens per chunk
    rotate       of the positions of a chunk
    all_experts  show every token to every expert, for the sums only
    advance      called with the share of a layer, 0 to 1, that has been computed since the last call
    """

    load: Loader
    chunk_size: int
    rotate: Rotation
    all_experts: bool
    advance: Callable[[float], None]


@dataclass(frozen=True)
class _Routes:
    """experts, weights: (n_tokens, n_chosen), on the CPU"""

    experts: torch.Tensor
    weights: torch.Tensor


@torch.inference_mode()
def run_layer(sweep: Sweep, layer: int, before: States, middle: States, after: States) -> Accumulator:
    """Compute one layer from `before` into `after`, and return what its matrices have seen.

    before  hidden states of all tokens; may be the same object as `middle`, and is then overwritten
    raises  BadImportance naming layer and tensor when NaN or infinity turns up
    """
    seen = Accumulator()
    routes = _first_sweep(sweep, layer, before, middle, after, seen)
    seen.refuse_nonfinite()
    if routes is not None:
        _second_sweep(sweep, layer, routes, middle, after, seen)
        seen.refuse_nonfinite()
    return seen


def _first_sweep(
    sweep: Sweep, layer: int, before: States, middle: States, after: States, seen: Accumulator
) -> _Routes | None:
    load, config, device = sweep.load, sweep.load.model.config, sweep.load.device
    is_dense = layer < config.first_k_dense_replace
    attention = load_attention(load, layer)
    norm = load.float32(f"blk.{layer}.ffn_norm.weight", config.hidden_size)
    router = None if is_dense else load_router(load, layer)
    block, names = _block_of_all_tokens(load, layer, is_dense)
    share = _chunks_share(sweep, is_dense) / (before.n_rows // sweep.chunk_size)
    chosen, weights = [], []
    for start in range(0, before.n_rows, sweep.chunk_size):
        stop = start + sweep.chunk_size
        hidden = before.read(start, stop).to(device)
        hidden = hidden + attention(hidden, sweep.rotate, seen)
        _refuse_nonfinite(hidden, f"blk.{layer}.attn_output.weight")
        x = rms_norm(hidden, norm, config.rms_norm_eps)
        if router is not None:
            seen.add(f"blk.{layer}.ffn_gate_inp.weight", x)
            experts, scores = router(x)
            chosen.append(experts.cpu())
            weights.append(scores.cpu())
        if block is not None:
            hidden = hidden + block.observed(x.to(load.dtype), names, seen)
            _refuse_nonfinite(hidden, names[2])
        middle.write(start, x.cpu())
        after.write(start, hidden.cpu())
        sweep.advance(share)
    return None if is_dense else _Routes(torch.cat(chosen), torch.cat(weights))


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


def _second_sweep(
    sweep: Sweep, layer: int, routes: _Routes, middle: States, after: States, seen: Accumulator
) -> None:
    n_experts = sweep.load.model.config.n_routed_experts
    share = (1 - _chunks_share(sweep, is_dense=False)) / n_experts
    for expert, block in _experts_ahead(sweep.load, layer, n_experts):
        tokens, slots = torch.nonzero(routes.experts == expert, as_tuple=True)
        weights = routes.weights[tokens, slots]
        _run_expert(sweep, (layer, expert), block, (tokens, weights), middle, after, seen)
        sweep.advance(share)


def _experts_ahead(load: Loader, layer: int, n_experts: int) -> Iterator[tuple[int, FeedForward]]:
    """Yield every expert; the next one is read while this one is at work."""
    with ThreadPoolExecutor(1) as reader:
        coming = reader.submit(load_expert, load, layer, 0)
        for expert in range(n_experts):
            block = coming.result()
            if expert + 1 < n_experts:
                coming = reader.submit(load_expert, load, layer, expert + 1)
            yield expert, block
            del block


def _run_expert(
    sweep: Sweep,
    place: tuple[int, int],
    block: FeedForward,
    routed: tuple[torch.Tensor, torch.Tensor],
    middle: States,
    after: States,
    seen: Accumulator,
) -> None:
    """Add the expert's output to the tokens routed to it; count what it sees.

    place   layer and expert
    routed  numbers of the tokens, ascending, and the expert's weight for each
    """
    layer, expert = place
    config, dtype, device = sweep.load.model.config, sweep.load.dtype, sweep.load.device
    gate, up, down = names_of(layer, "_exps")
    tokens, weights = routed
    if sweep.all_experts:
        share = torch.zeros(middle.n_rows)
        share[tokens] = weights
        shown = torch.arange(middle.n_rows)
    else:
        share, shown = weights, tokens
    sums_in = torch.zeros(config.hidden_size, dtype=torch.float64)
    sums_inner = torch.zeros(config.moe_intermediate_size, dtype=torch.float64)
    for start in range(0, len(shown), _EXPERT_ROWS):
        rows = shown[start : start + _EXPERT_ROWS]
        x = middle.rows(rows).to(device, dtype)
        inner = block.inner(x)
        sums_in += sums_of_squares(x)
        sums_inner += sums_of_squares(inner)
        part = share[start : start + _EXPERT_ROWS]
        if sweep.all_experts:
            used = part != 0
            rows, part, inner = rows[used], part[used], inner[used.to(device)]
        if len(rows):
            output = linear(inner, block.down).float().mul_(part.to(device)[:, None])
            _refuse_nonfinite(output, f"{down}, expert {expert}")
            after.add(rows, output.cpu())
    for name, sums in ((gate, sums_in), (up, sums_in), (down, sums_inner)):
        seen.add_expert(name, expert, config.n_routed_experts, sums, len(shown))


def _refuse_nonfinite(states: torch.Tensor, after: str) -> None:
    # A sum has NaN or infinity when a state has, and is one pass over them.
    if not bool(torch.isfinite(states.sum())):
        raise BadImportance(f"{after}: the hidden states after it have NaN or infinity")
