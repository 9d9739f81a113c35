"""The keys deepseek2.* and how each follows from the configuration.

What the keys say of the heads depends on the layout of attention:

    split       one key head of kv_lora + rope columns, as it is cached; the uncompressed sizes in keys of
                their own
    both, none  the uncompressed heads

Where this deliberately differs from llama.cpp's own converter:

    expert_gating_func   always written. That converter copies scoring_func, and a V3 config.json without
                         one becomes a softmax model.
    expert_weights_norm  not written for V2: the model ignores norm_topk_prob.
    expert_weights_scale always written: what the model computes with when config.json doesn't say.
    expert_group_count   1 where the choice of experts isn't restricted (V2 with topk_method greedy; all
                         groups used), because llama.cpp restricts by groups whenever there are several,
                         and stops when all of several may be used.
    yarn_beta_*          always written with YaRN.
    block_count          counts the MTP layers that are kept; the loader splits them off again by
                         nextn_predict_layers.
"""

from __future__ import annotations

from convert.architectures.base import Key, Options
from convert.architectures.deepseek2.config import DeepseekConfig
from convert.architectures.deepseek2.places import layers, mtp_layers
from gguf_tools.values import Value

GATING_FUNCTIONS = {"softmax": 1, "sigmoid": 2}


def _uncompressed(options: Options) -> bool:
    """Return whether the file describes the heads as they are before compression, as for plain attention."""
    return options.mla != "split"


def _norm(config: DeepseekConfig, options: Options) -> bool | None:
    """Written when true; ik_llama.cpp's converter writes false too."""
    return config.norm_topk_prob or (False if options.mla == "both" else None)


def _key_length(config: DeepseekConfig, options: Options) -> int:
    return config.qk_head_dim if _uncompressed(options) else config.kv_a_rows


def _value_length(config: DeepseekConfig, options: Options) -> int:
    return config.v_head_dim if _uncompressed(options) else config.kv_lora_rank


def _log_multiplier(config: DeepseekConfig, options: Options) -> float | None:
    """A tenth of mscale_all_dim: the loader divides it out again."""
    if config.yarn is None or config.yarn.mscale_all_dim is None:
        return None
    return 0.1 * config.yarn.mscale_all_dim


_u32, _f32, _bool, _string = Value.u32, Value.f32, Value.bool_, Value.string

METADATA: tuple[Key, ...] = (
    Key("block_count", _u32, lambda c, o: len(layers(c, o))),
    Key("context_length", _u32, lambda c, o: c.max_position_embeddings),
    Key("embedding_length", _u32, lambda c, o: c.hidden_size),
    Key("feed_forward_length", _u32, lambda c, o: c.intermediate_size),
    Key("attention.head_count", _u32, lambda c, o: c.num_attention_heads),
    Key("attention.head_count_kv", _u32, lambda c, o: c.num_attention_heads if _uncompressed(o) else 1),
    Key("rope.scaling.type", _string, lambda c, o: c.yarn and "yarn"),
    Key("rope.scaling.factor", _f32, lambda c, o: c.yarn and c.yarn.factor),
    Key("rope.scaling.original_context_length", _u32, lambda c, o: c.yarn and c.yarn.original_context),
    Key("rope.scaling.yarn_attn_factor", _f32, lambda c, o: c.yarn and c.yarn.attention_factor),
    Key("rope.scaling.yarn_beta_fast", _f32, lambda c, o: c.yarn and c.yarn.beta_fast),
    Key("rope.scaling.yarn_beta_slow", _f32, lambda c, o: c.yarn and c.yarn.beta_slow),
    Key("rope.freq_base", _f32, lambda c, o: c.rope_theta),
    Key("attention.layer_norm_rms_epsilon", _f32, lambda c, o: c.rms_norm_eps),
    Key("expert_count", _u32, lambda c, o: c.n_routed_experts),
    Key("expert_used_count", _u32, lambda c, o: c.num_experts_per_tok),
    Key("expert_group_count", _u32, lambda c, o: c.expert_groups and c.expert_groups[0]),
    Key("expert_group_used_count", _u32, lambda c, o: c.expert_groups and c.expert_groups[1]),
    Key("expert_gating_func", _u32, lambda c, o: GATING_FUNCTIONS[c.scoring_func]),
    Key("attention.key_length", _u32, _key_length),
    Key("attention.value_length", _u32, _value_length),
    Key("leading_dense_block_count", _u32, lambda c, o: c.first_k_dense_replace),
    Key("vocab_size", _u32, lambda c, o: c.vocab_size),
    Key("attention.q_lora_rank", _u32, lambda c, o: c.q_lora_rank),
    Key("attention.kv_lora_rank", _u32, lambda c, o: c.kv_lora_rank),
    # These two tell llama.cpp that the heads are compressed.
    Key("attention.key_length_mla", _u32, lambda c, o: None if _uncompressed(o) else c.qk_head_dim),
    Key("attention.value_length_mla", _u32, lambda c, o: None if _uncompressed(o) else c.v_head_dim),
    Key("expert_feed_forward_length", _u32, lambda c, o: c.moe_intermediate_size),
    Key("expert_shared_count", _u32, lambda c, o: c.n_shared_experts),
    Key("expert_weights_scale", _f32, lambda c, o: c.routed_scaling_factor),
    Key("expert_weights_norm", _bool, _norm),
    Key("rope.dimension_count", _u32, lambda c, o: c.qk_rope_head_dim),
    Key("rope.scaling.yarn_log_multiplier", _f32, _log_multiplier),
    Key("nextn_predict_layers", _u32, lambda c, o: len(mtp_layers(c, o)) or None),
)
