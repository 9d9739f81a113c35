"""DeepSeek V2, V2.5, V3, V3.1, R1 (and their derivatives) as llama.cpp's `deepseek2`.

What differs between source and file, everything else is renamed:

    kv_b_proj   (heads * (nope + v), kv_lora): per head its key rows, then its value rows. Multi-head latent
                attention multiplies queries with the key half transposed (attn_k_b: per head
                kv_lora x nope) and the attended latent with the value half (attn_v_b: per head
                v x kv_lora).
    experts     one matrix per expert there, one stack per layer here
    MTP layers  the layers from num_hidden_layers on; with them, block_count counts them too, and the
                loader splits them off again by nextn_predict_layers

Layouts of the attention (Options.mla), tensors as (mats, rows, cols):

    split  attn_k_b (heads, kv_lora, nope), attn_v_b (heads, v, kv_lora); the file says that there is one
           key head of kv_lora + rope, as it is cached
    both   attn_kv_b (heads*(nope+v), kv_lora), attn_k_b (heads*kv_lora, nope), attn_v_b (heads*v, kv_lora);
           the file says what the uncompressed heads are like. ik_llama.cpp reads it, llama.cpp does not.
    none   attn_kv_b; keys as with "both". Both programs read it, as plain attention.

Where this deliberately differs from llama.cpp's own converter:

    expert_gating_func   always written. That converter copies scoring_func, and a V3 config.json without
                         one becomes a softmax model.
    expert_weights_norm  not written for V2: the model ignores norm_topk_prob.
    expert_weights_scale always written: what the model computes with when config.json doesn't say.
    expert_group_count   1 where the choice of experts isn't restricted (V2 with topk_method greedy; all
                         groups used), because llama.cpp restricts by groups whenever there are several,
                         and stops when all of several may be used.
    yarn_beta_*          always written with YaRN.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from convert.architectures.arrange import HeadRows, OutputTensor, TransposedHeadRows, row_type
from convert.architectures.base import Architecture, Key, Options
from convert.architectures.rules import Drop, Output, Rule, Where, renamed, stacked
from convert.config import V2, V3, DeepseekConfig
from convert.weights.base import Weight
from gguf_tools.errors import BadRequest
from gguf_tools.values import Value

GATING_FUNCTIONS = {"softmax": 1, "sigmoid": 2}


# ---- where a rule applies


def _once(config: DeepseekConfig, options: Options) -> Iterable[int | None]:
    return (None,)


def _layers(config: DeepseekConfig, options: Options) -> range:
    """Return the layers that the file has: with MTP, those behind the model's own too."""
    return range(config.num_hidden_layers + (config.num_nextn_predict_layers if options.mtp else 0))


def _mtp_layers(config: DeepseekConfig, options: Options) -> range:
    return _layers(config, options)[config.num_hidden_layers :]


def _dense_layers(config: DeepseekConfig, options: Options) -> range:
    return _layers(config, options)[: config.first_k_dense_replace]


def _moe_layers(config: DeepseekConfig, options: Options) -> range:
    return _layers(config, options)[config.first_k_dense_replace :]


def _biased_moe_layers(config: DeepseekConfig, options: Options) -> Iterable[int | None]:
    return _moe_layers(config, options) if config.topk_method == "noaux_tc" else ()


def _lora_q_layers(config: DeepseekConfig, options: Options) -> Iterable[int | None]:
    return () if config.q_lora_rank is None else _layers(config, options)


def _full_q_layers(config: DeepseekConfig, options: Options) -> Iterable[int | None]:
    return _layers(config, options) if config.q_lora_rank is None else ()


def _layers_with(mla: str) -> Where:
    return lambda config, options: _layers(config, options) if options.mla == mla else ()


def _untied(config: DeepseekConfig, options: Options) -> Iterable[int | None]:
    return () if config.tie_word_embeddings else (None,)


# ---- what becomes of kv_b_proj


def _keys(name: str, weights: Sequence[Weight], config: DeepseekConfig) -> OutputTensor:
    """Return attn_k_b: every head's key rows, transposed; (n_heads, kv_lora_rank, qk_nope_head_dim)."""
    (weight,) = weights
    head_rows = config.qk_nope_head_dim + config.v_head_dim
    shape = (config.num_attention_heads, config.kv_lora_rank, config.qk_nope_head_dim)
    return TransposedHeadRows(name, shape, row_type(weight), weight, head_rows, 0, config.qk_nope_head_dim)


def _values(name: str, weights: Sequence[Weight], config: DeepseekConfig) -> OutputTensor:
    """Return attn_v_b: every head's value rows; (n_heads, v_head_dim, kv_lora_rank)."""
    (weight,) = weights
    head_rows = config.qk_nope_head_dim + config.v_head_dim
    shape = (config.num_attention_heads, config.v_head_dim, config.kv_lora_rank)
    return HeadRows(name, shape, weight.type, weight, head_rows, config.qk_nope_head_dim, config.v_head_dim)


def _flat_keys(name: str, weights: Sequence[Weight], config: DeepseekConfig) -> OutputTensor:
    return _flat(_keys(name, weights, config))


def _flat_values(name: str, weights: Sequence[Weight], config: DeepseekConfig) -> OutputTensor:
    return _flat(_values(name, weights, config))


def _flat(tensor: OutputTensor) -> OutputTensor:
    """Return the same rows as one matrix: head h has rows h*n_rows to (h+1)*n_rows."""
    n_mats, n_rows, n_cols = tensor.shape
    return replace(tensor, shape=(n_mats * n_rows, n_cols))


# ---- the rules


def _one(where: Where, name: str, source: str, sizes: str) -> Rule:
    return Rule(where, (Output(name, source, sizes),))


def _in_layer(where: Where, name: str, source: str, sizes: str) -> Rule:
    return _one(where, f"blk.{{layer}}.{name}", f"model.layers.{{layer}}.{source}", sizes)


def _experts(where: Where, *parts: tuple[str, str, str]) -> Rule:
    """Return a rule that stacks the experts of a layer; its stacks are complete at the same moment."""
    prefix = "model.layers.{layer}.mlp.experts.{expert}"
    return Rule(where, tuple(
        Output(f"blk.{{layer}}.{name}", f"{prefix}.{source}", sizes, stacked) for name, source, sizes in parts
    ))  # fmt: skip


def _kv_b(mla: str, *parts: tuple[str, Any]) -> Rule:
    source = "model.layers.{layer}.self_attn.kv_b_proj.weight"
    return Rule(_layers_with(mla), tuple(
        Output(f"blk.{{layer}}.{name}", source, "kv_b_rows kv_lora_rank", arrange) for name, arrange in parts
    ))  # fmt: skip


RULES: tuple[Rule, ...] = (
    _one(_once, "token_embd.weight", "model.embed_tokens.weight", "vocab_size hidden_size"),
    _one(_once, "output_norm.weight", "model.norm.weight", "hidden_size"),
    _one(_untied, "output.weight", "lm_head.weight", "vocab_size hidden_size"),

    _in_layer(_layers, "attn_norm.weight", "input_layernorm.weight", "hidden_size"),
    _in_layer(_full_q_layers, "attn_q.weight", "self_attn.q_proj.weight", "q_rows hidden_size"),
    _in_layer(_lora_q_layers, "attn_q_a.weight", "self_attn.q_a_proj.weight", "q_lora_rank hidden_size"),
    _in_layer(_lora_q_layers, "attn_q_a_norm.weight", "self_attn.q_a_layernorm.weight", "q_lora_rank"),
    _in_layer(_lora_q_layers, "attn_q_b.weight", "self_attn.q_b_proj.weight", "q_rows q_lora_rank"),
    _in_layer(_layers, "attn_kv_a_mqa.weight", "self_attn.kv_a_proj_with_mqa.weight",
              "kv_a_rows hidden_size"),
    _in_layer(_layers, "attn_kv_a_norm.weight", "self_attn.kv_a_layernorm.weight", "kv_lora_rank"),
    _kv_b("split", ("attn_k_b.weight", _keys), ("attn_v_b.weight", _values)),
    _kv_b("both", ("attn_kv_b.weight", renamed), ("attn_k_b.weight", _flat_keys),
          ("attn_v_b.weight", _flat_values)),
    _kv_b("none", ("attn_kv_b.weight", renamed)),
    _in_layer(_layers, "attn_output.weight", "self_attn.o_proj.weight", "hidden_size attention_cols"),

    _in_layer(_layers, "ffn_norm.weight", "post_attention_layernorm.weight", "hidden_size"),
    _in_layer(_dense_layers, "ffn_gate.weight", "mlp.gate_proj.weight", "intermediate_size hidden_size"),
    _in_layer(_dense_layers, "ffn_up.weight", "mlp.up_proj.weight", "intermediate_size hidden_size"),
    _in_layer(_dense_layers, "ffn_down.weight", "mlp.down_proj.weight", "hidden_size intermediate_size"),

    _in_layer(_moe_layers, "ffn_gate_inp.weight", "mlp.gate.weight", "n_routed_experts hidden_size"),
    _in_layer(_biased_moe_layers, "exp_probs_b.bias", "mlp.gate.e_score_correction_bias",
              "n_routed_experts"),
    _experts(
        _moe_layers,
        ("ffn_down_exps.weight", "down_proj.weight", "hidden_size moe_intermediate_size"),
        ("ffn_gate_exps.weight", "gate_proj.weight", "moe_intermediate_size hidden_size"),
        ("ffn_up_exps.weight", "up_proj.weight", "moe_intermediate_size hidden_size"),
    ),
    _in_layer(_moe_layers, "ffn_gate_shexp.weight", "mlp.shared_experts.gate_proj.weight",
              "shared_intermediate_size hidden_size"),
    _in_layer(_moe_layers, "ffn_up_shexp.weight", "mlp.shared_experts.up_proj.weight",
              "shared_intermediate_size hidden_size"),
    _in_layer(_moe_layers, "ffn_down_shexp.weight", "mlp.shared_experts.down_proj.weight",
              "hidden_size shared_intermediate_size"),

    _in_layer(_mtp_layers, "nextn.embed_tokens.weight", "embed_tokens.weight", "vocab_size hidden_size"),
    _in_layer(_mtp_layers, "nextn.enorm.weight", "enorm.weight", "hidden_size"),
    _in_layer(_mtp_layers, "nextn.hnorm.weight", "hnorm.weight", "hidden_size"),
    _in_layer(_mtp_layers, "nextn.eh_proj.weight", "eh_proj.weight", "hidden_size concat_size"),
    _in_layer(_mtp_layers, "nextn.shared_head_norm.weight", "shared_head.norm.weight", "hidden_size"),
    _in_layer(_mtp_layers, "nextn.shared_head_head.weight", "shared_head.head.weight",
              "vocab_size hidden_size"),
)  # fmt: skip


def drops(config: DeepseekConfig, options: Options) -> tuple[Drop, ...]:
    """Return what this model's checkpoint may hold that the file does not need."""
    found = [Drop(lambda name: name.endswith(".rotary_emb.inv_freq"), "computed from rope_theta")]
    if config.tie_word_embeddings:
        found.append(
            Drop(lambda name: name == "lm_head.weight", "tied: the token embedding is the output layer")
        )
    if not options.mtp:
        found.append(Drop(
            lambda name: _layer_of(name) >= config.num_hidden_layers,
            "multi-token prediction layer; kept with --mtp",
        ))  # fmt: skip
    return tuple(found)


def _layer_of(name: str) -> int:
    """Return the layer that a weight belongs to, -1 for none."""
    match = re.match(r"model\.layers\.(\d{1,9})\.", name)
    return int(match[1]) if match else -1


# ---- metadata


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
    Key("block_count", _u32, lambda c, o: len(_layers(c, o))),
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
    Key("nextn_predict_layers", _u32, lambda c, o: len(_mtp_layers(c, o)) or None),
)


# ---- what to know before running the file


def notes(config: DeepseekConfig, options: Options) -> tuple[str, ...]:
    """Return where llama.cpp will not load this model, or compute something else than the original."""
    return tuple(note for note in (
        _lite_note(config), _group_note(config), _norm_note(config), _yarn_note(config), _eps_note(config)
    ) if note)  # fmt: skip


def _lite_note(config: DeepseekConfig) -> str | None:
    # llama.cpp knows "lite" models by their depth (load_arch_hparams of deepseek2), whatever the file says.
    n_layers = config.num_hidden_layers
    lite = n_layers in (26, 27) or (n_layers == 48 and config.vocab_size == 128256)
    if config.q_lora_rank is None and not lite:
        return (
            "llama.cpp loads a model without q_lora_rank only when it has 26 or 27 layers; this one has"
            f" {n_layers}"
        )
    if config.q_lora_rank is not None and lite:
        return (
            f"llama.cpp takes a model of {n_layers} layers for one without q_lora_rank and will not load this"
            " one, which has it"
        )
    return None


def _group_note(config: DeepseekConfig) -> str | None:
    if config.topk_method != "group_limited_greedy" or config.expert_groups in (None, (1, 1)):
        return None
    return (
        f"{config.n_group} groups of experts: llama.cpp scores a group by its two best experts, this model by"
        " the best one, so llama.cpp may choose other experts"
    )


def _norm_note(config: DeepseekConfig) -> str | None:
    if config.norm_requested == config.norm_topk_prob:
        return None
    return f"norm_topk_prob is true but {config.architecture} does not normalise expert weights; not written"


def _yarn_note(config: DeepseekConfig) -> str | None:
    # The deepseek2 graph scales the softmax by mscale_all_dim and rotated parts by 1, which fits mscale ==
    # mscale_all_dim and no explicit attention_factor.
    yarn = config.yarn
    if yarn is None or (yarn.mscale_all_dim and abs(yarn.rotary_factor - 1.0) < 1e-6):
        return None
    return (
        f"YaRN with mscale {yarn.mscale}, mscale_all_dim {yarn.mscale_all_dim}, attention_factor"
        f" {yarn.attention_factor}: llama.cpp takes mscale for equal to mscale_all_dim and will compute other"
        " attention scores"
    )


def _eps_note(config: DeepseekConfig) -> str | None:
    if config.rms_norm_eps == 1e-6:
        return None
    return (
        f"rms_norm_eps is {config.rms_norm_eps:g}: the original norms its compressed queries and keys with"
        " 1e-06, llama.cpp with this one"
    )


def check(config: DeepseekConfig, options: Options) -> None:
    """Raise BadRequest when the options ask for what the model doesn't have."""
    if options.mtp and not config.num_nextn_predict_layers:
        raise BadRequest(
            "--mtp: config.json has no num_nextn_predict_layers, so there is no MTP layer to keep"
        )


ARCHITECTURE = Architecture(
    hf_names=(V2, V3),
    gguf_name="deepseek2",
    read_config=DeepseekConfig.from_dict,
    n_experts=lambda config: config.n_routed_experts,
    rules=RULES,
    drops=drops,
    metadata=METADATA,
    notes=notes,
    check=check,
)
