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
from forward.families.parts import FeedForwards, network_of, routing_of
from forward.layer import Layer
from forward.layers.attention.gqa import HeadSizes, load_shared_key_attention
from forward.layers.experts import Groups
from forward.layers.load import Loader
from forward.layers.residual import RMSNorm
from forward.layers.rope import Rope, Rotation
from forward.network import Family, Network
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
    heads, feed_forwards = _head_sizes(config), _feed_forwards(config, style)
    rope, sliding = _rope(config, style), frozenset(config.sliding_layers)

    def build(load: Loader, number: int, rotate: Rotation) -> Layer:
        window = config.sliding_window if number in sliding else None
        rotate = _with_divisors(load, rope, rotate)
        attention = load_shared_key_attention(load, number, heads, rotate, window)
        weight = load.float32(f"blk.{number}.{style.ffn_norm}.weight", config.hidden_size)
        norm = RMSNorm(weight, config.rms_norm_eps)
        return Layer(f"blk.{number}", attention, norm, *feed_forwards.load(load, number))

    return network_of(config, rope, build)


def _head_sizes(config: DecoderConfig) -> HeadSizes:
    return HeadSizes(
        hidden=config.hidden_size,
        n_heads=config.num_attention_heads,
        n_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        rotated=config.rotated_cols,
        eps=config.rms_norm_eps,
    )


def _feed_forwards(config: DecoderConfig, style: _Style) -> FeedForwards:
    return FeedForwards(
        hidden=config.hidden_size,
        n_dense=config.first_k_dense_replace if config.num_experts else config.num_hidden_layers,
        dense_width=config.intermediate_size,
        shared_width=config.shared_intermediate_size,
        n_experts=config.num_experts,
        expert_width=config.moe_intermediate_size,
        routing=routing_of(config, Groups(config.n_group or 1, config.topk_group or 1, n_best=2)),
        clamped=style.clamped,
    )


def _rope(config: DecoderConfig, style: _Style) -> Rope:
    """Read the rotation, without Llama 3's divisors, which are a tensor."""
    scaling = config.rope
    if scaling.kind == "longrope":
        raise UnsupportedCheckpoint("RoPE of type longrope: the forward pass has no factors for it")
    slowed = scaling.factor if scaling.kind == "linear" and scaling.factor else 1.0
    plain = Rope(config.rotated_cols, scaling.theta, halves=style.halves, slowed=slowed)
    stretch = scaling.yarn
    return plain if stretch is None else replace(plain, yarn=stretch, magnitude=stretch.rotary_factor)


def _with_divisors(load: Loader, rope: Rope, rotate: Rotation) -> Rotation:
    """Divide the frequencies by the tensor of divisors that a model may have."""
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
