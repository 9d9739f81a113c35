"""The keys deepseek4.*, in the order of llama.cpp's converter.

Where this differs from it: the ratios and limits of layers are written for the layers that the file has,
because the loader wants as many.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from convert.architectures.base import Key
from gguf_tools import keys
from gguf_tools.values import Value

GATING_FUNCTIONS: Mapping[str, int] = {"softmax": 1, "sigmoid": 2, "sqrtsoftplus": 4}
"""Number in expert_gating_func for each scoring function."""

_u32, _f32, _f32s = Value.u32, Value.f32, Value.f32s


def _yarn(name: str) -> Any:
    return lambda c, o: getattr(c.rope, name) if c.rope.kind == "yarn" else None


def _limits(config: Any, options: Any) -> tuple[float, ...]:
    return (config.swiglu_limit,) * config.num_hidden_layers


METADATA: tuple[Key, ...] = (
    Key(keys.BLOCK_COUNT, _u32, lambda c, o: c.num_hidden_layers),
    Key(keys.CONTEXT_LENGTH, _u32, lambda c, o: c.max_position_embeddings),
    Key(keys.EMBEDDING_LENGTH, _u32, lambda c, o: c.hidden_size),
    Key(keys.FEED_FORWARD_LENGTH, _u32, lambda c, o: c.intermediate_size),
    Key(keys.HEAD_COUNT, _u32, lambda c, o: c.num_attention_heads),
    Key(keys.HEAD_COUNT_KV, _u32, lambda c, o: c.num_key_value_heads),
    Key(keys.ROPE_SCALING_TYPE, Value.string, lambda c, o: "yarn" if c.rope.kind == "yarn" else None),
    Key(keys.ROPE_SCALING_FACTOR, _f32, _yarn("factor")),
    Key(keys.ROPE_SCALING_ORIG_CTX_LEN, _u32, _yarn("original_context")),
    Key(keys.ROPE_SCALING_YARN_EXT_FACTOR, _f32, _yarn("extrapolation_factor")),
    Key(keys.ROPE_SCALING_YARN_ATTN_FACTOR, _f32, _yarn("written_factor")),
    Key(keys.ROPE_SCALING_YARN_BETA_FAST, _f32, _yarn("beta_fast")),
    Key(keys.ROPE_SCALING_YARN_BETA_SLOW, _f32, _yarn("beta_slow")),
    Key(keys.ROPE_FREQ_BASE, _f32, lambda c, o: c.rope.theta),
    Key(keys.LAYERNORM_RMS_EPS, _f32, lambda c, o: c.rms_norm_eps),
    Key(keys.EXPERT_COUNT, _u32, lambda c, o: c.n_routed_experts),
    Key(keys.EXPERT_USED_COUNT, _u32, lambda c, o: c.num_experts_per_tok),
    Key(keys.EXPERT_GATING_FUNC, _u32, lambda c, o: GATING_FUNCTIONS[c.scoring_func]),
    Key(keys.KEY_LENGTH, _u32, lambda c, o: c.head_dim),
    Key(keys.VALUE_LENGTH, _u32, lambda c, o: c.head_dim),
    Key(keys.ROPE_DIMENSION_COUNT, _u32, lambda c, o: c.qk_rope_head_dim),
    Key(keys.Q_LORA_RANK, _u32, lambda c, o: c.q_lora_rank),
    Key(keys.SLIDING_WINDOW, _u32, lambda c, o: c.sliding_window),
    Key(keys.EXPERT_FEED_FORWARD_LENGTH, _u32, lambda c, o: c.moe_intermediate_size),
    Key(keys.EXPERT_SHARED_COUNT, _u32, lambda c, o: c.n_shared_experts),
    Key(keys.EXPERT_WEIGHTS_SCALE, _f32, lambda c, o: c.routed_scaling_factor),
    Key(keys.EXPERT_WEIGHTS_NORM, Value.bool_, lambda c, o: c.norm_topk_prob),
    Key("{arch}.swiglu_clamp_exp", _f32s, _limits),
    Key("{arch}.swiglu_clamp_shexp", _f32s, _limits),
    Key(keys.INDEXER_HEAD_COUNT, _u32, lambda c, o: c.index_n_heads),
    Key(keys.INDEXER_KEY_LENGTH, _u32, lambda c, o: c.index_head_dim),
    Key(keys.INDEXER_TOP_K, _u32, lambda c, o: c.index_topk),
    Key("{arch}.attention.output_group_count", _u32, lambda c, o: c.o_groups),
    Key("{arch}.attention.output_lora_rank", _u32, lambda c, o: c.o_lora_rank),
    Key("{arch}.attention.compress_ratios", Value.i32s, lambda c, o: c.compress_ratios),
    Key("{arch}.attention.compress_rope_freq_base", _f32, lambda c, o: c.compress_rope_theta),
    Key("{arch}.hyper_connection.count", _u32, lambda c, o: c.hc_mult),
    Key("{arch}.hyper_connection.sinkhorn_iterations", _u32, lambda c, o: c.hc_sinkhorn_iters),
    Key("{arch}.hyper_connection.epsilon", _f32, lambda c, o: c.hc_eps),
    Key("{arch}.hash_layer_count", _u32, lambda c, o: c.num_hash_layers),
)
