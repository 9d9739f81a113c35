"""The network of DeepSeek V4: strands of hidden states, keys of windows, experts in every layer."""

from __future__ import annotations

from dataclasses import replace

from convert.architectures.deepseek4.config import OVERLAPPING, V4Config
from convert.architectures.deepseek4.metadata import read_metadata
from forward.layer import Layer
from forward.layers.attention.compressed import CompressedSizes, load_compressed_attention
from forward.layers.attention.compressor import CompressorSizes, load_compressor, load_window_indexer
from forward.layers.experts import Routing, load_experts
from forward.layers.ffn import BlockNames, load_ffn
from forward.layers.hyper_connections import StrandSizes, load_hyper_connection, load_strands_end
from forward.layers.load import Loader
from forward.layers.norm import RMSNorm
from forward.layers.rope import Rope, Rotation
from forward.network import EMBEDDINGS, OUTPUT, Family, Network


def _network(config: V4Config) -> Network:
    """Return the network of a DeepSeek V4."""
    hidden, eps = config.hidden_size, config.rms_norm_eps
    strands = StrandSizes(hidden=hidden, n_strands=config.hc_mult, n_rounds=config.hc_sinkhorn_iters,
                          eps=config.hc_eps, norm_eps=eps)  # fmt: skip
    sizes = CompressedSizes(
        hidden=hidden,
        n_heads=config.num_attention_heads,
        head_dim=config.head_dim,
        q_lora=config.q_lora_rank,
        o_groups=config.o_groups,
        o_lora=config.o_lora_rank,
        window=config.sliding_window,
    )
    plain = Rope(config.qk_rope_head_dim, config.rope.theta)
    slow, routing = _rope_of_windows(config), _routing(config)
    chooses = OVERLAPPING in config.compress_ratios

    def build(load: Loader, number: int, rotate: Rotation) -> Layer:
        name, ratio = f"blk.{number}", config.compress_ratios[number]
        compress = indexer = None
        if ratio:
            rotate = slow.rotation(len(rotate.turns), load.device)
            of_keys = CompressorSizes(ratio, config.head_dim, ratio == OVERLAPPING)
            compress = load_compressor(
                load, f"{name}.attn_compressor", of_keys, rotate, hidden=hidden, eps=eps
            )
            if of_keys.overlap:
                of_indexer = replace(of_keys, n_cols=config.index_head_dim)
                indexer = load_window_indexer(
                    load, number, of_indexer, rotate, n_heads=config.index_n_heads,
                    n_chosen=config.index_topk, hidden=hidden, q_lora=config.q_lora_rank, eps=eps,
                )  # fmt: skip
        width, limit = config.moe_intermediate_size, config.swiglu_limit or None
        return Layer(
            name=name,
            attention=load_compressed_attention(
                load, number, sizes, rotate, eps=eps, compress=compress, indexer=indexer
            ),
            norm=RMSNorm(load.float32(f"{name}.ffn_norm.weight", hidden), eps),
            block=load_ffn(
                load, BlockNames.of(number, "_shexp"), hidden, config.shared_intermediate_size, limit=limit
            ),
            experts=load_experts(
                load, number, routing, config.n_routed_experts, hidden, width, limit=limit
            ),
            around_attention=load_hyper_connection(load, f"{name}.hc_attn", strands),
            around_block=load_hyper_connection(load, f"{name}.hc_ffn", strands),
            attention_end="attn_output_b.weight",
        )

    return Network(
        n_layers=config.num_hidden_layers,
        hidden_size=hidden,
        vocab_size=config.vocab_size,
        output=EMBEDDINGS if config.tie_word_embeddings else OUTPUT,
        norm_eps=eps,
        rope=plain,
        build=build,
        # Windows are chosen in chunks that have more of them.
        n_chosen=OVERLAPPING * config.index_topk if chooses else None,
        n_strands=config.hc_mult,
        end=lambda load, norm: load_strands_end(load, strands, norm),
    )


def _routing(config: V4Config) -> Routing:
    scoring = config.scoring_func
    return Routing(
        n_used=config.num_experts_per_tok,
        scoring="softmax" if scoring == "softmax" else "sigmoid" if scoring == "sigmoid" else "sqrtsoftplus",
        groups=None,
        normalise=config.norm_topk_prob,
        scale=config.routed_scaling_factor,
    )


def _rope_of_windows(config: V4Config) -> Rope:
    """Return the rotation in layers with windows. YaRN stretches theirs alone, and makes nothing sharper."""
    rope, stretch = Rope(config.qk_rope_head_dim, config.compress_rope_theta), config.rope.yarn
    if stretch is None:
        return rope
    return replace(rope, yarn=stretch, magnitude=config.rope.attention_factor or 1.0)


DEEPSEEK4 = Family(read_metadata, _network, {})
"""DeepSeek V4 and V4-Flash."""
