"""Networks of ordinary decoders: plain attention or a gated delta net, then a dense block or experts.

Most differences between families show in which tensors a model has: biases, norms of queries and keys, sinks,
shared experts, factors of RoPE. A row of DECODERS says the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from convert.architectures.decoder.config import DecoderConfig
from convert.architectures.decoder.metadata import read_decoder
from convert.architectures.delta_net.config import DeltaNetConfig
from convert.architectures.delta_net.metadata import read_delta_net_file
from convert.architectures.granite import read_granite_file
from convert.architectures.mamba2 import MambaConfig
from imatrix.forward.families.parts import (
    FeedForwards,
    mamba_sizes,
    network_of,
    rope_of,
    routing_of,
    unstretched,
)
from imatrix.forward.layer import Attention, Layer
from imatrix.forward.layers.attention.delta_net import DeltaNetSizes, load_delta_net
from imatrix.forward.layers.attention.mamba2 import load_mamba2
from imatrix.forward.layers.attention.shared_keys import HeadSizes, load_shared_key_attention
from imatrix.forward.layers.experts import Groups
from imatrix.forward.layers.load import Loader
from imatrix.forward.layers.residual import PLAIN, UNNORMED, Norm, RMSNorm, Scaled
from imatrix.forward.layers.rope import Rope, Rotation
from imatrix.forward.network import Family, LogitRule, Network

ROPE_FREQS = "rope_freqs.weight"
LONG_FACTORS = ("rope_factors_long.weight", "rope_factors_short.weight")
"""Divisors for texts longer than the original context, and for others."""

_CONTEXT_STEP = 256
"""Contexts of llama.cpp are whole multiples of this (llama_context), and choose between these tables."""


@dataclass(frozen=True)
class _Style:
    """Properties of a family that the tensors of its files don't show.

    halves     whether half of the rotated columns lie between the two of a pair; neighbours otherwise
    ffn_norm   name of the norm before the feed-forward block; "" where neither it nor attention has one
    post_norms whether norms stand behind attention and block
    local      how layers with a window rotate: "stretched" as others, with a theta of their own;
               "unstretched"; "plain", with the theta of others, too
    tables     divisors of frequencies that its files may have: "long" for two tables, one for long texts;
               "either" for these where the rotation is of type longrope, else one
    clamped    whether experts have gpt-oss's gate
    gated      whether attention has gates
    fused      whether queries, keys and values are one matrix, gate and up another
    gemma      whether it is Gemma 3's: GELU, scaled embeddings
    read       reads its configuration; None: as of other decoders
    tiled      how heads of delta nets share keys, see DeltaNetSizes
    """

    halves: bool = True
    ffn_norm: str = "ffn_norm"
    post_norms: bool = False
    local: str = "stretched"
    tables: str = ""
    clamped: bool = False
    gated: bool = False
    fused: bool = False
    gemma: bool = False
    tiled: bool = False
    read: Callable[..., DecoderConfig] | None = None


def _network(style: _Style, config: DecoderConfig) -> Network:
    heads, feed_forwards = _head_sizes(config, style), _feed_forwards(config, style)
    rope = rope_of(config.rope, config.rotated_cols, halves=style.halves)
    sliding = frozenset(config.sliding_layers)
    local = _local_rope(config, style, rope)
    linear = _linear_layers(config)
    residual = PLAIN if config.residual_scale is None else Scaled(config.residual_scale)

    def rotation_of(load: Loader, number: int, rotate: Rotation) -> Rotation | None:
        if number in sliding:
            return local.rotation(len(rotate.turns), load.device)
        if number in config.unrotated_layers:
            return None
        return with_divisors(load, rope, rotate, tables_of(rotate))

    def tables_of(rotate: Rotation) -> Sequence[str]:
        if not style.tables:
            return ()
        if style.tables != "long" and config.rope.kind != "longrope":
            return (ROPE_FREQS,)
        context = -(-len(rotate.turns) // _CONTEXT_STEP) * _CONTEXT_STEP
        is_long = context > (config.rope.original_context or 0)
        return LONG_FACTORS if is_long else LONG_FACTORS[::-1]

    def attention_of(load: Loader, number: int, rotate: Rotation) -> Attention:
        if number in linear:
            if isinstance(config, DeltaNetConfig):
                return load_delta_net(load, number, _delta_net_sizes(config, style))
            assert isinstance(config, MambaConfig)
            return load_mamba2(load, number, mamba_sizes(config))
        window = config.sliding_window if number in sliding else None
        rotate_here = rotation_of(load, number, rotate)
        attention = load_shared_key_attention(load, number, heads, rotate_here, window)
        if config.sharpness is not None:
            attention = replace(attention, sharpness=rotate.sharpness(config.sharpness))
        if not style.post_norms:
            return attention
        weight = load.float32(f"blk.{number}.post_attention_norm.weight", config.hidden_size)
        return replace(attention, post_norm=RMSNorm(weight, config.rms_norm_eps))

    def build(load: Loader, number: int, rotate: Rotation) -> Layer:
        attention = attention_of(load, number, rotate)
        norm: Norm = UNNORMED
        if style.ffn_norm:
            weight = load.float32(f"blk.{number}.{style.ffn_norm}.weight", config.hidden_size)
            norm = RMSNorm(weight, config.rms_norm_eps)
        end = "ssm_out.weight" if number in linear else "attn_output.weight"
        parts = feed_forwards.load(load, number)
        return Layer(f"blk.{number}", attention, norm, *parts, residual, residual, attention_end=end)

    scale = config.hidden_size**0.5 if style.gemma else config.embedding_scale or 1.0
    rule = LogitRule(1 / (config.logit_scale or 1.0), config.final_logit_softcapping)
    return network_of(config, rope, build, embedding_scale=scale, logits=rule)


def _linear_layers(config: DecoderConfig) -> tuple[int, ...]:
    """Return the layers that have something else in place of attention."""
    if isinstance(config, DeltaNetConfig):
        return config.linear_layers
    return config.mamba_layers if isinstance(config, MambaConfig) else ()


def _delta_net_sizes(config: DeltaNetConfig, style: _Style) -> DeltaNetSizes:
    return DeltaNetSizes(
        hidden=config.hidden_size,
        n_key_heads=config.linear_num_key_heads,
        n_value_heads=config.linear_num_value_heads,
        n_key_cols=config.linear_key_head_dim,
        n_value_cols=config.linear_value_head_dim,
        kernel=config.linear_conv_kernel_dim,
        tiled=style.tiled,
        eps=config.rms_norm_eps,
    )


def _head_sizes(config: DecoderConfig, style: _Style) -> HeadSizes:
    return HeadSizes(
        hidden=config.hidden_size,
        n_heads=config.num_attention_heads,
        n_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        rotated=config.rotated_cols,
        eps=config.rms_norm_eps,
        gated=style.gated,
        scale=config.attention_scale,
        normed=bool(style.ffn_norm),
        fused=style.fused,
    )


def _feed_forwards(config: DecoderConfig, style: _Style) -> FeedForwards:
    return FeedForwards(
        hidden=config.hidden_size,
        n_dense=config.first_k_dense_replace if config.num_experts else None,
        dense_width=config.intermediate_size,
        shared_width=config.shared_intermediate_size,
        n_experts=config.num_experts,
        expert_width=config.moe_intermediate_size,
        routing=routing_of(config, Groups(config.n_group or 1, config.topk_group or 1, n_best=2)),
        clamped=style.clamped,
        post_norm_eps=config.rms_norm_eps if style.post_norms else None,
        gelu=style.gemma,
        fused=style.fused,
    )


def _local_rope(config: DecoderConfig, style: _Style, rope: Rope) -> Rope:
    """Read the rotation of layers with a window."""
    if style.local == "plain":
        return Rope(rope.n_cols, rope.theta, halves=rope.halves)
    theta = config.sliding_theta or rope.theta
    if style.local == "unstretched":
        return unstretched(rope, theta)
    # By the factor even where a model says that nothing is scaled, as llama.cpp does.
    slowed = 1.0 if rope.yarn is not None else config.rope.factor or 1.0
    return replace(rope, theta=theta, slowed=slowed)


def with_divisors(
    load: Loader, rope: Rope, rotate: Rotation, tables: Sequence[str] = (ROPE_FREQS,)
) -> Rotation:
    """Divide the frequencies by the first of some tables that a model may have, with a number for each pair.

    All of them are read, as all belong to the model.
    """
    found = [load.float32(table, rope.n_cols // 2) if load.has(table) else None for table in tables]
    if not found or found[0] is None:
        return rotate
    return replace(rope, divisors=found[0]).rotation(len(rotate.turns), load.device)


def _family(name: str, style: _Style) -> Family:
    read = style.read or (read_delta_net_file if style.gated else read_decoder)
    return Family(partial(read, name), partial(_network, style), {})


DECODERS: Mapping[str, Family] = {
    name: _family(name, style)
    for name, style in {
        "llama": _Style(halves=False, tables="either"),
        "deepseek": _Style(halves=False),
        "smollm3": _Style(halves=False),
        "qwen2": _Style(),
        "qwen3": _Style(),
        "qwen3moe": _Style(),
        "glm4moe": _Style(ffn_norm="post_attention_norm"),
        "gpt-oss": _Style(ffn_norm="post_attention_norm", clamped=True),
        "minimax-m2": _Style(),
        "gemma3": _Style(gemma=True, post_norms=True, local="unstretched"),
        "seed_oss": _Style(ffn_norm="post_attention_norm"),
        "olmo2": _Style(ffn_norm="", post_norms=True, local="plain"),
        "mistral3": _Style(halves=False, tables="either"),
        "phi3": _Style(fused=True, tables="long"),
        "granite": _Style(halves=False, tables="either", read=read_granite_file),
        "granitemoe": _Style(halves=False, tables="either", read=read_granite_file),
        "granitehybrid": _Style(halves=False, tables="either", read=read_granite_file),
        "qwen3next": _Style(ffn_norm="post_attention_norm", gated=True),
        "qwen35": _Style(ffn_norm="post_attention_norm", gated=True, tiled=True),
        "qwen35moe": _Style(ffn_norm="post_attention_norm", gated=True, tiled=True),
    }.items()
}
"""Families of ordinary decoders, by the name that general.architecture gives them."""
