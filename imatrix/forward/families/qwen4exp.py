"""The network of Qwen4Exp: strands that gates mix, delta nets or attention to chosen blocks, experts."""

from __future__ import annotations

from dataclasses import replace

from convert.architectures.delta_net.qwen4exp import Qwen4Config
from imatrix.forward.families.parts import FeedForwards, delta_net_sizes, network_of, rope_of
from imatrix.forward.layer import Attention, Layer
from imatrix.forward.layers.attention.delta_net import load_delta_net
from imatrix.forward.layers.attention.mean_indexer import MeanSizes, load_mean_indexer
from imatrix.forward.layers.attention.shared_keys import HeadSizes, load_shared_key_attention
from imatrix.forward.layers.gated_strands import (
    GatedStrands,
    StrandNorm,
    load_gated_strands,
    load_strand_norm,
)
from imatrix.forward.layers.load import Loader
from imatrix.forward.layers.ngrams import NgramSizes, load_ngram_entry
from imatrix.forward.layers.residual import UNNORMED, RMSNorm
from imatrix.forward.layers.rope import Rotation
from imatrix.forward.network import Network


def qwen4exp_network(config: Qwen4Config) -> Network:
    hidden, eps, n_strands = config.hidden_size, config.rms_norm_eps, config.hc_count
    feed_forwards, heads, blocks = FeedForwards.of(config, 0, None), _head_sizes(config), _block_sizes(config)
    nets = replace(delta_net_sizes(config, tiled=True), normed=False, sigmoid=True)

    def attention_of(load: Loader, number: int, rotate: Rotation) -> Attention:
        if number in config.linear_layers:
            return load_delta_net(load, number, nets)
        attention = load_shared_key_attention(load, number, heads, rotate, None)
        return replace(attention, indexer=load_mean_indexer(load, number, blocks, rotate, hidden, eps))

    def strands(load: Loader, name: str) -> GatedStrands:
        norm = load_strand_norm(load, f"{name}_norm.weight", n_strands, hidden, eps)
        return load_gated_strands(load, name, norm, config.hc_lowrank, hidden)

    def build(load: Loader, number: int, rotate: Rotation) -> Layer:
        name, entry = f"blk.{number}", None
        if number in config.ple_layers:
            entry = load_ngram_entry(load, number, _ngram_sizes(config), n_strands, hidden, eps)
        return Layer(
            name,
            attention_of(load, number, rotate),
            UNNORMED,
            *feed_forwards.load(load, number),
            around_attention=strands(load, f"{name}.hc_attn"),
            around_block=strands(load, f"{name}.hc_ffn"),
            attention_end="ssm_out.weight" if number in config.linear_layers else "attn_output.weight",
            entry=entry,
        )

    def end(load: Loader, norm: RMSNorm) -> GatedStrands:
        return load_gated_strands(load, "output_hc", StrandNorm(norm, n_strands), config.hc_lowrank, hidden)

    return network_of(
        config,
        rope_of(config.rope, config.rotated_cols, halves=True),
        build,
        n_chosen=config.indexer_budget,
        n_strands=n_strands,
        output_norm="output_hc_norm.weight",
        n_normed=n_strands,
        end=end,
    )


def _head_sizes(config: Qwen4Config) -> HeadSizes:
    return HeadSizes(
        hidden=config.hidden_size,
        n_heads=config.num_attention_heads,
        n_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        rotated=config.rotated_cols,
        eps=config.rms_norm_eps,
        gated=True,
        normed=False,
    )


def _block_sizes(config: Qwen4Config) -> MeanSizes:
    return MeanSizes(
        n_heads=config.indexer_n_heads,
        n_cols=config.indexer_head_dim,
        length=config.indexer_compress_ratio,
        n_chosen=config.indexer_budget // config.indexer_compress_ratio,
    )


def _ngram_sizes(config: Qwen4Config) -> NgramSizes:
    return NgramSizes(
        n_tokens=config.ngram_size,
        multipliers=config.multipliers,
        offsets=config.offsets,
        rows=config.head_sizes,
        n_cols=config.ngram_cols,
        end=config.ple_eos,
        kernel=config.ple_conv_kernel_size,
    )
