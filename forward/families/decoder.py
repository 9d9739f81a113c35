"""Networks of ordinary decoders: plain attention, then a dense block or experts.

Most differences between families show in which tensors a model has: biases, norms of queries and keys, sinks,
shared experts, factors of RoPE. A row of DECODERS says the rest.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

from convert.architectures.decoder.config import DecoderConfig
from convert.architectures.decoder.metadata import read_decoder
from forward.layer import Layer
from forward.layers.attention.gqa import HeadSizes, load_shared_key_attention
from forward.layers.experts import Groups, Routing, load_experts
from forward.layers.ffn import BlockNames, load_ffn
from forward.layers.load import Loader
from forward.layers.norm import RMSNorm
from forward.layers.rope import Rope, Rotation
from forward.network import EMBEDDINGS, OUTPUT, Family, Network
from gguf_tools.errors import UnsupportedCheckpoint

ROPE_FREQS = "rope_freqs.weight"


@dataclass(frozen=True)
class _Style:
    """What the tensors of a family's files don't show.

    halves     whether half of the rotated columns lie between the two of a pair; neighbours otherwise
    ffn_norm   name of the norm before the feed-forward block
    clamped    whether experts have gpt-oss's gate
    """

    halves: bool = True
    ffn_norm: str = "ffn_norm"
    clamped: bool = False


def _network(style: _Style, config: DecoderConfig) -> Network:
    """Return the network of an ordinary decoder."""
    hidden, eps = config.hidden_size, config.rms_norm_eps
    sizes = HeadSizes(
        hidden, config.num_attention_heads, config.num_key_value_heads, config.head_dim, config.rotated_cols
    )
    rope, routing, sliding = _rope(config, style), _routing(config), frozenset(config.sliding_layers)

    def build(load: Loader, number: int, rotate: Rotation) -> Layer:
        name = f"blk.{number}"
        attention = load_shared_key_attention(
            load,
            number,
            sizes,
            _with_divisors(load, rope, rotate),
            eps=eps,
            window=config.sliding_window if number in sliding else None,
        )
        norm = RMSNorm(load.float32(f"{name}.{style.ffn_norm}.weight", hidden), eps)
        is_dense = not config.num_experts or number < config.first_k_dense_replace
        width = config.intermediate_size if is_dense else config.shared_intermediate_size
        names = BlockNames.of(number, "" if is_dense else "_shexp")
        block = load_ffn(load, names, hidden, width) if width else None
        if is_dense:
            return Layer(name, attention, norm, block, experts=None)
        experts = load_experts(
            load, number, routing, config.num_experts, hidden, config.moe_intermediate_size,
            clamped=style.clamped,
        )  # fmt: skip
        return Layer(name, attention, norm, block, experts)

    return Network(
        n_layers=config.num_hidden_layers,
        hidden_size=hidden,
        vocab_size=config.vocab_size,
        output=EMBEDDINGS if config.tie_word_embeddings else OUTPUT,
        norm_eps=eps,
        rope=rope,
        build=build,
    )


def _routing(config: DecoderConfig) -> Routing:
    n_groups, n_used = config.n_group or 1, config.topk_group or 1
    return Routing(
        n_used=config.num_experts_per_tok,
        scoring="sigmoid" if config.scoring_func == "sigmoid" else "softmax",
        groups=None if n_groups == n_used else Groups(n_groups, n_used, 2),
        normalise=config.norm_topk_prob,
        scale=config.routed_scaling_factor,
    )


def _rope(config: DecoderConfig, style: _Style) -> Rope:
    """Return the rotation, without Llama 3's divisors, which are a tensor."""
    scaling = config.rope
    if scaling.kind == "longrope":
        raise UnsupportedCheckpoint("RoPE of type longrope: the forward pass has no factors for it")
    slowed = scaling.factor if scaling.kind == "linear" and scaling.factor else 1.0
    plain = Rope(config.rotated_cols, scaling.theta, halves=style.halves, slowed=slowed)
    stretch = scaling.yarn
    return plain if stretch is None else replace(plain, yarn=stretch, magnitude=stretch.rotary_factor)


def _with_divisors(load: Loader, rope: Rope, rotate: Rotation) -> Rotation:
    """Return the rotation with the divisors of frequencies that the model may have as a tensor."""
    if not load.has(ROPE_FREQS):
        return rotate
    divisors = load.float32(ROPE_FREQS, rope.n_cols // 2)
    return replace(rope, divisors=divisors).rotation(len(rotate.turns), load.device)


def _family(name: str, style: _Style) -> Family:
    return Family(partial(read_decoder, name), partial(_network, style), {})


DECODERS: Mapping[str, Family] = {
    name: _family(name, style)
    for name, style in {
        "llama": _Style(halves=False),
        "deepseek": _Style(halves=False),
        "qwen2": _Style(),
        "qwen3": _Style(),
        "qwen3moe": _Style(),
        "glm4moe": _Style(ffn_norm="post_attention_norm"),
        "gpt-oss": _Style(ffn_norm="post_attention_norm", clamped=True),
        "minimax-m2": _Style(),
    }.items()
}
"""Families of ordinary decoders, by the name that general.architecture gives them."""
