"""The keys deepseek4.*, in the order of llama.cpp's converter; `read_metadata` is the inverse."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from convert.architectures.base import Key
from convert.architectures.decoder.metadata import (
    GATING_FUNCTIONS,
    ROTATION,
    SIZES,
    read_rotation,
    scoring_function,
)
from convert.architectures.deepseek4.config import OVERLAPPING, V4Config
from gguf_tools.errors import FormatError, MissingTensor, UnsupportedCheckpoint
from gguf_tools.format import keys
from gguf_tools.format.hparams import HParams, read_hparams
from gguf_tools.format.values import Metadata, Value

_GATING_FUNCTIONS: Mapping[str, int] = {**GATING_FUNCTIONS, "sqrtsoftplus": 4}

_u32, _f32, _f32s = Value.u32, Value.f32, Value.f32s


def _limits(config: Any, options: Any) -> tuple[float, ...]:
    return (config.swiglu_limit,) * config.num_hidden_layers


METADATA: tuple[Key, ...] = (
    Key(keys.BLOCK_COUNT, _u32, lambda c, o: c.num_hidden_layers),
    *SIZES,
    Key(keys.HEAD_COUNT_KV, _u32, lambda c, o: c.num_key_value_heads),
    *ROTATION,
    Key(keys.EXPERT_COUNT, _u32, lambda c, o: c.n_routed_experts),
    Key(keys.EXPERT_USED_COUNT, _u32, lambda c, o: c.num_experts_per_tok),
    Key(keys.EXPERT_GATING_FUNC, _u32, lambda c, o: _GATING_FUNCTIONS[c.scoring_func]),
    Key(keys.KEY_LENGTH, _u32, lambda c, o: c.head_dim),
    Key(keys.VALUE_LENGTH, _u32, lambda c, o: c.head_dim),
    Key(keys.ROPE_DIMENSION_COUNT, _u32, lambda c, o: c.qk_rope_head_dim),
    Key(keys.Q_LORA_RANK, _u32, lambda c, o: c.q_lora_rank),
    Key(keys.SLIDING_WINDOW, _u32, lambda c, o: c.sliding_window),
    Key(keys.EXPERT_FEED_FORWARD_LENGTH, _u32, lambda c, o: c.moe_intermediate_size),
    Key(keys.EXPERT_SHARED_COUNT, _u32, lambda c, o: c.n_shared_experts),
    Key(keys.EXPERT_WEIGHTS_SCALE, _f32, lambda c, o: c.routed_scaling_factor),
    Key(keys.EXPERT_WEIGHTS_NORM, Value.bool_, lambda c, o: c.norm_topk_prob),
    Key(keys.SWIGLU_CLAMP_EXP, _f32s, _limits),
    Key(keys.SWIGLU_CLAMP_SHEXP, _f32s, _limits),
    Key(keys.INDEXER_HEAD_COUNT, _u32, lambda c, o: c.index_n_heads),
    Key(keys.INDEXER_KEY_LENGTH, _u32, lambda c, o: c.index_head_dim),
    Key(keys.INDEXER_TOP_K, _u32, lambda c, o: c.index_topk),
    Key(keys.OUTPUT_GROUP_COUNT, _u32, lambda c, o: c.o_groups),
    Key(keys.OUTPUT_LORA_RANK, _u32, lambda c, o: c.o_lora_rank),
    Key(keys.COMPRESS_RATIOS, Value.i32s, lambda c, o: (*c.compress_ratios, *c.mtp_ratios)),
    Key(keys.COMPRESS_ROPE_FREQ_BASE, _f32, lambda c, o: c.compress_rope_theta),
    Key(keys.HYPER_CONNECTION_COUNT, _u32, lambda c, o: c.hc_mult),
    Key(keys.HYPER_CONNECTION_ITERATIONS, _u32, lambda c, o: c.hc_sinkhorn_iters),
    Key(keys.HYPER_CONNECTION_EPSILON, _f32, lambda c, o: c.hc_eps),
    Key(keys.HASH_LAYER_COUNT, _u32, lambda c, o: c.num_hash_layers),
    Key(keys.EMBEDDING_LENGTH_OUT, _u32, lambda c, o: c.hc_mult * c.hidden_size),
)


def read_metadata(metadata: Metadata, shapes: Mapping[str, tuple[int, ...]], path: str | Path) -> V4Config:
    """Read the configuration out of the keys and tensors of a GGUF file.

    shapes  tensor name -> shape, rows first
    raises  FormatError, MissingTensor, UnsupportedCheckpoint, naming the file and the key
    """
    hparams = read_hparams(metadata, "deepseek4", path)
    size = hparams.size
    if "token_embd.weight" not in shapes:
        raise MissingTensor(f"{path}: no tensor token_embd.weight")
    heads, head_dim, groups = size("head_count"), size("key_length"), size("output_group_count")
    rotated = size("rope_dimension_count")
    if not heads or not groups or heads % groups or rotated % 2 or not 0 < rotated <= head_dim:
        raise FormatError(
            f"{path}: {heads} heads of {head_dim} columns in {groups} groups, {rotated} columns rotated:"
            " expected a deepseek4 model"
        )
    ratios = _ratios(hparams)
    intermediate = hparams.first("feed_forward_length")
    return V4Config(
        vocab_size=shapes["token_embd.weight"][0],
        hidden_size=size("embedding_length"),
        intermediate_size=intermediate,
        moe_intermediate_size=size("expert_feed_forward_length"),
        num_hidden_layers=size("block_count"),
        num_attention_heads=heads,
        num_key_value_heads=size("head_count_kv", 1),
        head_dim=head_dim,
        q_lora_rank=size("q_lora_rank"),
        o_lora_rank=size("output_lora_rank"),
        o_groups=groups,
        qk_rope_head_dim=rotated,
        max_position_embeddings=size("context_length", 0),
        sliding_window=size("sliding_window"),
        rms_norm_eps=hparams.number("layer_norm_rms_epsilon", 1e-6),
        rope=read_rotation(hparams, ("yarn", "none")),
        compress_rope_theta=hparams.number("compress_rope_freq_base", 160000.0),
        compress_ratios=ratios,
        heavy_ratio=next((ratio for ratio in ratios if ratio not in (0, OVERLAPPING)), 1),
        n_routed_experts=size("expert_count"),
        n_shared_experts=size("expert_shared_count"),
        num_experts_per_tok=size("expert_used_count"),
        num_hash_layers=size("hash_layer_count"),
        scoring_func=scoring_function(hparams, _GATING_FUNCTIONS),
        norm_topk_prob=hparams.expert_weights_norm is not False,
        routed_scaling_factor=hparams.number("expert_weights_scale", 1.0) or 1.0,
        swiglu_limit=_limit(hparams),
        index_n_heads=size("indexer_head_count"),
        index_head_dim=size("indexer_key_length"),
        index_topk=size("indexer_top_k"),
        hc_mult=size("hyper_connection_count"),
        hc_sinkhorn_iters=size("hyper_connection_iterations"),
        hc_eps=hparams.number("hyper_connection_epsilon", 1e-6),
        tie_word_embeddings="output.weight" not in shapes,
    )


def _ratios(hparams: HParams) -> tuple[int, ...]:
    ratios, n_layers = hparams.compress_ratios, hparams.size("block_count")
    if not isinstance(ratios, tuple) or len(ratios) < n_layers or min(ratios, default=0) < 0:
        raise FormatError(
            f"{hparams.path}: {hparams.key('compress_ratios')} is {ratios!r:.60},"
            f" expected a number for each of {n_layers} layers"
        )
    return ratios[:n_layers]


def _limit(hparams: HParams) -> float:
    """Return the limit of gate and up, which has to be the same in all layers; 0 for none."""
    limits: set[float] = set()
    for stated in (hparams.swiglu_clamp_exp, hparams.swiglu_clamp_shexp):
        if stated is not None:
            limits |= set(stated if isinstance(stated, tuple) else (stated,))
    if len(limits) > 1:
        raise UnsupportedCheckpoint(
            f"{hparams.path}: {hparams.key('swiglu_clamp_exp')} has {len(limits)} limits,"
            " expected one for all experts and layers"
        )
    return limits.pop() if limits else 0.0
