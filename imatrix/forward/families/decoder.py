"""Networks of ordinary decoders: plain attention or a gated delta net, then a dense block or experts.

Most differences between families show in which tensors a model has: biases, norms of queries and keys, sinks,
shared experts, factors of RoPE. The `Architecture` of a family says the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from convert.architectures.base import Architecture
from convert.architectures.decoder.config import DecoderConfig
from convert.architectures.delta_net.config import DeltaNetConfig
from convert.architectures.minimax_m3 import BlockIndexedConfig
from convert.architectures.recurrent.lfm2 import ShortConvConfig
from convert.architectures.recurrent.mamba2 import MambaConfig
from imatrix.forward.families.parts import (
    FeedForwards,
    delta_net_sizes,
    limited,
    mamba_sizes,
    network_of,
    rope_of,
    unstretched,
)
from imatrix.forward.layer import Attention, Layer, SideBySide
from imatrix.forward.layers.activations import GELU, USUAL, XIELU, Gated, GatedGELU, Ungated, clamped
from imatrix.forward.layers.attention.block_indexer import load_block_indexer
from imatrix.forward.layers.attention.delta_net import load_delta_net
from imatrix.forward.layers.attention.mamba2 import load_mamba2
from imatrix.forward.layers.attention.shared_keys import (
    HeadSizes,
    SharedKeyAttention,
    load_shared_key_attention,
)
from imatrix.forward.layers.attention.short_conv import load_short_conv
from imatrix.forward.layers.experts import Groups
from imatrix.forward.layers.load import Loader
from imatrix.forward.layers.residual import PLAIN, UNNORMED, CentredNorm, Normed, Residual, RMSNorm, Scaled
from imatrix.forward.layers.rope import Rope, Rotation
from imatrix.forward.network import OUTPUT_BIAS, OUTPUT_NORM, LogitRule, Network

ROPE_FREQS = "rope_freqs.weight"
LONG_FACTORS = ("rope_factors_long.weight", "rope_factors_short.weight")
"""Divisors for texts longer than the original context, and for others."""

_CONTEXT_STEP = 256
"""Contexts of llama.cpp are whole multiples of this (llama_context), and choose between these tables."""


def decoder_network(family: Architecture, config: DecoderConfig) -> Network:
    """Build the network of an ordinary decoder."""
    heads, feed_forwards = _head_sizes(family, config), _feed_forwards(family, config)
    # M-RoPE rotates halves in every architecture.
    halves = family.rotation == "halves" or config.mrope_section is not None
    rope = rope_of(config.rope, config.rotated_cols, halves=halves)
    local_heads = _local_heads(heads, config)
    sliding = frozenset(config.sliding_layers)
    local = _local_rope(family, config, rope)
    norm_name, has_post_norms = _norm_of_blocks(family), family.makes(_POST_NORM)
    linear = _linear_layers(config)
    is_mamba = family.makes("blk.{layer}.ssm_out.weight")
    plain_norms = _has_plain_norms(family, config)
    linear_end = "ssm_out.weight" if is_mamba else "shortconv.out_proj.weight"

    def rotation_of(load: Loader, number: int, rotate: Rotation) -> Rotation | None:
        if number in sliding and family.windows != "alike":
            return local.rotation(len(rotate.turns), load.device)
        if number in config.unrotated_layers:
            return None
        n_pairs = max(rope.n_cols, config.sliding_cols or 0) // 2
        return with_divisors(load, rope, rotate, _tables(family, config, rotate), n_pairs)

    def attention_of(load: Loader, number: int, rotate: Rotation) -> Attention:
        if number in linear:
            return _load_linear(load, number, family, config)
        window = config.sliding_window if number in sliding else None
        rotate_here = rotation_of(load, number, rotate)
        sizes = local_heads if number in sliding else heads
        attention = load_shared_key_attention(load, number, sizes, rotate_here, window)
        attention = _with_own_parts(attention, load, number, family, config, rotate)
        if isinstance(config, MambaConfig) and config.beside_attention:
            return SideBySide(attention, load_mamba2(load, number, mamba_sizes(config)))
        if not has_post_norms:
            return attention
        weight = load.float32(f"blk.{number}.post_attention_norm.weight", config.hidden_size)
        return replace(attention, post_norm=RMSNorm(weight, config.post_norm_eps or config.rms_norm_eps))

    def build(load: Loader, number: int, rotate: Rotation) -> Layer:
        attention = attention_of(load, number, rotate)
        norm = _norm(load, f"blk.{number}.{norm_name}", config, plain=plain_norms) if norm_name else UNNORMED
        end = linear_end if number in linear else "attn_output.weight"
        parts = feed_forwards.load(load, number)
        around = _added(config.block_scale if parts[1] is not None else None, config.residual_scale)
        before = _added(config.attention_value_scale, config.residual_scale)
        if config.norms_embeddings and number == 0:
            before = _normed_embeddings(load, config)
        layer = Layer(f"blk.{number}", attention, norm, *parts, before, around)
        layer = replace(layer, attention_end=end, is_parallel=config.is_parallel)
        return limited(layer, number, config.expert_limits, config.block_limits)

    end = None if plain_norms else (lambda load, norm: _norm(load, OUTPUT_NORM, config))
    return network_of(
        config,
        rope,
        build,
        embedding_scale=config.embedding_scale or 1.0,
        logits=LogitRule(1 / (config.logit_scale or 1.0), config.final_logit_softcapping),
        end=end,
        n_chosen=config.indexer.n_positions if isinstance(config, BlockIndexedConfig) else None,
        builds_mtp=not config.dense_mtp,
        output_norm=OUTPUT_NORM if family.makes(OUTPUT_NORM) else "token_embd_norm.weight",
        has_output_bias=family.makes(OUTPUT_BIAS),
        encodes=family.encodes,
    )


def _added(*scales: float | None) -> Residual:
    """Return how a layer adds what it computed: multiplied by the first of the scales that is a number."""
    return next((Scaled(scale) for scale in scales if scale is not None), PLAIN)


def _normed_embeddings(load: Loader, config: DecoderConfig) -> Normed:
    """Build the norm of the hidden states before the first layer, which has no weight."""
    return Normed(RMSNorm(torch.ones(config.hidden_size, device=load.device), config.rms_norm_eps))


def _with_own_parts(
    attention: SharedKeyAttention,
    load: Loader,
    number: int,
    family: Architecture,
    config: DecoderConfig,
    rotate: Rotation,
) -> SharedKeyAttention:
    """Give the attention of a layer what few models have: another norm, an indexer, sharpness."""
    if not _has_plain_norms(family, config):
        attention = replace(attention, norm=_norm(load, f"blk.{number}.attn_norm.weight", config))
    if isinstance(config, BlockIndexedConfig) and number >= config.first_k_dense_replace:
        hidden, n_rotated, eps = config.hidden_size, config.rotated_cols, config.rms_norm_eps
        indexer = load_block_indexer(load, number, config.indexer, hidden, rotate, n_rotated, eps)
        attention = replace(attention, indexer=indexer)
    if config.sharpness is not None and (number in config.unrotated_layers or not config.unrotated_layers):
        growth = rotate.sharpness(config.sharpness, config.sharpness_offset)
        attention = replace(attention, sharpness=growth)
    if config.unit_qk and number not in config.unrotated_layers:
        unit = RMSNorm(torch.ones(config.head_dim, device=load.device), config.rms_norm_eps)
        attention = replace(attention, q_norm=unit, k_norm=unit)
    return replace(attention, chunked=config.sliding_chunks)


def _has_plain_norms(family: Architecture, config: DecoderConfig) -> bool:
    """Return whether norms of hidden states are RMSNorms without biases."""
    return not config.centred_norms and not family.makes(_biased(OUTPUT_NORM))


def _norm(load: Loader, name: str, config: DecoderConfig, *, plain: bool = False) -> RMSNorm:
    """Read the weight of a norm of hidden states, and unless it is `plain`, its bias where it has one."""
    weight, bias = load.float32(name, config.hidden_size), _biased(name)
    if plain:
        return RMSNorm(weight, config.rms_norm_eps)
    added = load.float32(bias, config.hidden_size) if load.has(bias) else None
    return (CentredNorm if config.centred_norms else RMSNorm)(weight, config.rms_norm_eps, added)


def _biased(name: str) -> str:
    """Return the name of the bias beside a weight."""
    return f"{name.removesuffix('.weight')}.bias"


def _tables(family: Architecture, config: DecoderConfig, rotate: Rotation) -> Sequence[str]:
    """Return the tables of divisors that a model may have, that of these texts first."""
    has_both = family.makes(LONG_FACTORS[0])
    if not has_both and not family.makes(ROPE_FREQS):
        return ()
    if not has_both and config.rope.kind != "longrope":
        return (ROPE_FREQS,)
    context = -(-len(rotate.turns) // _CONTEXT_STEP) * _CONTEXT_STEP
    is_long = context > (config.rope.original_context or 0)
    return LONG_FACTORS if is_long else LONG_FACTORS[::-1]


_POST_NORM = "blk.{layer}.post_ffw_norm.weight"


def _norm_of_blocks(family: Architecture) -> str:
    """Return the name of the norm before feed-forward blocks; "" where neither they nor attention have one.

    A norm that is called after attention stands behind it where blocks have one behind them, too. Without
    either, blocks have the norm of attention.
    """
    for name in ("ffn_norm.weight", "ffn_norm"):
        if family.makes(f"blk.{{layer}}.{name}"):
            return name
    if not family.makes("blk.{layer}.post_attention_norm.weight"):
        return "attn_norm.weight"
    return "" if family.makes(_POST_NORM) else "post_attention_norm.weight"


def _linear_layers(config: DecoderConfig) -> tuple[int, ...]:
    """Return the layers that have something else in place of attention."""
    if isinstance(config, DeltaNetConfig):
        return config.linear_layers
    if isinstance(config, ShortConvConfig):
        return config.conv_layers
    return config.mamba_layers if isinstance(config, MambaConfig) and not config.beside_attention else ()


def _load_linear(load: Loader, number: int, family: Architecture, config: DecoderConfig) -> Attention:
    """Read what a layer has in place of attention."""
    if isinstance(config, DeltaNetConfig):
        return load_delta_net(load, number, delta_net_sizes(config, tiled=family.tiled))
    if isinstance(config, ShortConvConfig):
        return load_short_conv(load, number, config.hidden_size, config.conv_L_cache, config.rms_norm_eps)
    assert isinstance(config, MambaConfig)
    return load_mamba2(load, number, mamba_sizes(config))


def _local_heads(heads: HeadSizes, config: DecoderConfig) -> HeadSizes:
    """Return the sizes of heads in layers with a window."""
    return replace(
        heads,
        n_heads=config.heads_in_windows,
        n_kv_heads=config.windowed.num_key_value_heads,
        rotated=config.sliding_cols or config.rotated_cols,
    )


def _head_sizes(family: Architecture, config: DecoderConfig) -> HeadSizes:
    return HeadSizes(
        hidden=config.hidden_size,
        n_heads=config.num_attention_heads,
        n_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        rotated=config.rotated_cols,
        eps=config.rms_norm_eps,
        gated=isinstance(config, DeltaNetConfig),
        scale=config.attention_scale,
        softcap=config.attention_softcapping,
        normed=bool(_norm_of_blocks(family)),
        fused=not family.makes("blk.{layer}.attn_q.weight"),
        norms_rotated=family.norms_rotated,
        causal=not family.encodes,
        sigmoid_gates=config.sigmoid_gates,
        value_cols=config.value_cols,
    )


def _feed_forwards(family: Architecture, config: DecoderConfig) -> FeedForwards:
    return FeedForwards.of(
        config,
        config.first_k_dense_replace if config.num_experts else None,
        Groups(config.n_group or 1, config.topk_group or 1, n_best=2),
        activation=_activation(family),
        post_norm_eps=(config.post_norm_eps or config.rms_norm_eps) if family.makes(_POST_NORM) else None,
        fused=family.gated and not family.makes("blk.{layer}.ffn_gate.weight"),
        ungated=None if family.gated else lambda number: _ungated(family, config, number),
    )


def _activation(family: Architecture) -> Gated:
    """Return the activation of blocks and experts that have a gate."""
    if family.clamped:
        return clamped
    return GatedGELU(family.gelu) if family.gelu else USUAL


def _ungated(family: Architecture, config: DecoderConfig, number: int) -> Ungated:
    """Return the activation of a layer's block without a gate."""
    return GELU(family.gelu) if family.gelu else XIELU(*config.xielu[number])


def _local_rope(family: Architecture, config: DecoderConfig, rope: Rope) -> Rope:
    """Read the rotation of layers with a window."""
    if family.windows == "plain":
        return Rope(rope.n_cols, rope.theta, halves=rope.halves)
    theta = config.sliding_theta or rope.theta
    n_cols = config.sliding_cols or rope.n_cols
    if family.windows == "own":
        return Rope(n_cols, theta, halves=rope.halves)
    if family.windows.endswith("unstretched"):
        return replace(unstretched(rope, theta), n_cols=n_cols)
    # By the factor even where a model says that nothing is scaled, as llama.cpp does.
    slowed = 1.0 if rope.yarn is not None else config.rope.factor or 1.0
    return replace(rope, theta=theta, slowed=slowed)


def with_divisors(
    load: Loader,
    rope: Rope,
    rotate: Rotation,
    tables: Sequence[str] = (ROPE_FREQS,),
    n_pairs: int | None = None,
) -> Rotation:
    """Divide the frequencies by the first of some tables that a model may have, with a number for each pair.

    All of them are read, as all belong to the model.

    n_pairs  numbers of a table, of which the first ones count; None: as many as there are pairs
    """
    own = rope.n_cols // 2
    found = [load.float32(table, n_pairs or own) if load.has(table) else None for table in tables]
    if not found or found[0] is None:
        return rotate
    return replace(rope, divisors=found[0][:own]).rotation(len(rotate.turns), load.device)
