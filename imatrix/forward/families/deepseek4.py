"""The network of DeepSeek V4: strands of hidden states, keys of windows, experts in every layer."""

from __future__ import annotations

from dataclasses import replace

from convert.architectures.deepseek4 import OVERLAPPING, V4Config
from imatrix.forward.families.parts import FeedForwards, network_of
from imatrix.forward.layer import Layer
from imatrix.forward.layers.activations import SiLU
from imatrix.forward.layers.attention.compressed import (
    CompressedSizes,
    CompressorSizes,
    WindowIndexerSizes,
    load_compressed_attention,
    load_compressor,
    load_window_indexer,
)
from imatrix.forward.layers.hyper_connections import StrandSizes, load_hyper_connection, load_strands_end
from imatrix.forward.layers.load import Loader
from imatrix.forward.layers.residual import RMSNorm
from imatrix.forward.layers.rope import Rope, Rotation
from imatrix.forward.network import Network


def deepseek4_network(config: V4Config) -> Network:
    hidden, eps = config.hidden_size, config.rms_norm_eps
    strands, sizes = _strands(config), _attention_sizes(config)
    feed_forwards = FeedForwards.of(config, 0, None, activation=SiLU(config.swiglu_limit or None))
    # YaRN stretches the rotation of layers with windows alone, and makes nothing sharper.
    scaling = config.rope
    windows = Rope(config.rotated_cols, config.compress_rope_theta, scaling.yarn, slowed=scaling.slowed)

    def build(load: Loader, number: int, rotate: Rotation) -> Layer:
        name, ratio = f"blk.{number}", config.compress_ratios[number]
        compress = indexer = None
        if ratio:
            rotate = windows.rotation(len(rotate.turns), load.device)
            keys = CompressorSizes(ratio, config.head_dim, ratio == OVERLAPPING, hidden, eps)
            compress = load_compressor(load, f"{name}.attn_compressor", keys, rotate)
            if keys.overlap:
                indexer = load_window_indexer(load, number, _indexer_sizes(config, keys), rotate)
        attention = load_compressed_attention(load, number, sizes, rotate, compress, indexer)
        norm = RMSNorm(load.float32(f"{name}.ffn_norm.weight", hidden), eps)
        block, experts = feed_forwards.load(load, number)
        return Layer(
            name,
            attention,
            norm,
            block,
            experts,
            around_attention=load_hyper_connection(load, f"{name}.hc_attn", strands),
            around_block=load_hyper_connection(load, f"{name}.hc_ffn", strands),
            attention_end="attn_output_b.weight",
        )

    return network_of(
        config,
        Rope(config.rotated_cols, config.rope.theta),
        build,
        # Windows are chosen in chunks that have more of them.
        n_chosen=OVERLAPPING * config.index_topk if OVERLAPPING in config.compress_ratios else None,
        n_strands=config.hc_mult,
        end=lambda load, norm: load_strands_end(load, strands, norm),
    )


def _strands(config: V4Config) -> StrandSizes:
    return StrandSizes(
        hidden=config.hidden_size,
        n_strands=config.hc_mult,
        n_rounds=config.hc_sinkhorn_iters,
        eps=config.hc_eps,
        norm_eps=config.rms_norm_eps,
    )


def _attention_sizes(config: V4Config) -> CompressedSizes:
    return CompressedSizes(
        hidden=config.hidden_size,
        n_heads=config.num_attention_heads,
        head_dim=config.head_dim,
        q_lora=config.q_lora_rank,
        o_groups=config.o_groups,
        o_lora=config.o_lora_rank,
        window=config.sliding_window,
        eps=config.rms_norm_eps,
    )


def _indexer_sizes(config: V4Config, keys: CompressorSizes) -> WindowIndexerSizes:
    return WindowIndexerSizes(
        keys=replace(keys, n_cols=config.index_head_dim),
        n_heads=config.index_n_heads,
        n_chosen=config.index_topk,
        q_lora=config.q_lora_rank,
    )
