"""Ordinary families with routed experts, a block for each: what the parts in `decoder` leave open."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from convert.architectures.base import Key
from convert.architectures.config_reader import ConfigReader, merged
from convert.architectures.decoder.config import (
    DecoderConfig,
    decoder_fields,
    expert_fields,
    fix_head_dim,
    group_fields,
    layers_of_kind,
    with_defaults,
)
from convert.architectures.decoder.family import decoder, decoder_notes
from convert.architectures.decoder.metadata import (
    COMMON,
    DENSE_LAYERS,
    EXPERT_NORM,
    EXPERT_SCALE,
    EXPERT_WIDTH,
    GATING,
    ROTATED_COLS,
    SHARED_EXPERTS,
    SHARED_WIDTH,
    VOCAB_SIZE,
)
from convert.architectures.decoder.rope import paired
from convert.architectures.decoder.rules import (
    INV_FREQ,
    attention,
    biased_router,
    check_mtp,
    dense_blocks,
    dense_decoder,
    drop_mtp,
    ends,
    expert_stacks,
    fused_attention,
    in_layer,
    keep_last_mtp,
    layers,
    mixture_decoder,
    moe_layers,
    mtp,
    mtp_drops,
    n_mtp_layers,
    norm_of_blocks,
    respelled,
    shared_experts,
    sparse_moe_experts,
    sparse_moe_name,
)
from convert.architectures.options import MTPOptions, NoOptions
from convert.tokenizer.files import GLM, Quirks
from gguf_tools.errors import UnsupportedCheckpoint
from gguf_tools.format import keys
from gguf_tools.format.values import Value
from gguf_tools.text import quoted

# ---- Qwen 3 with routed experts in every layer, which a checkpoint stores one by one or in two stacks


def _read_qwen3moe(raw: Mapping[str, Any], path: str | Path) -> DecoderConfig:
    """Return the configuration of a Qwen 3 with experts."""
    read = with_defaults(raw, path)
    read.fixed("decoder_sparse_step", 1, "llama.cpp's qwen3moe has experts in every layer")
    read.fixed("mlp_only_layers", [], "llama.cpp's qwen3moe has experts in every layer")
    read.fixed("use_sliding_window", False, "llama.cpp's qwen3moe has no sliding window")
    read.overruled("sliding_window", "max_window_layers")
    return DecoderConfig(
        **decoder_fields(read),
        **expert_fields(read),
        moe_intermediate_size=read.size("moe_intermediate_size"),
        norm_topk_prob=read.flag("norm_topk_prob", False),
        attention_bias=read.flag("attention_bias", False),
        qk_norm=True,
    )


def _qwen3moe_notes(config: DecoderConfig, options: NoOptions) -> tuple[str, ...]:
    if config.norm_topk_prob:
        return decoder_notes(config)
    return (
        *decoder_notes(config),
        "norm_topk_prob is false: llama.cpp's qwen3moe normalises the weights of experts all the same",
    )


_QWEN3MOE = decoder(
    "Qwen3MoeForCausalLM",
    gguf_name="qwen3moe",
    read_config=_read_qwen3moe,
    rules=mixture_decoder(expert_stacks(layers)),
    metadata=(*COMMON, EXPERT_WIDTH),
    notes=_qwen3moe_notes,
)


# ---- Qwen2-MoE: experts in every layer, and a shared one with a gate of its own


def _read_qwen2moe(raw: Mapping[str, Any], path: str | Path) -> DecoderConfig:
    """Return the configuration of a Qwen 2 with experts."""
    read = with_defaults(raw, path)
    read.fixed("decoder_sparse_step", 1, "llama.cpp's qwen2moe has experts in every layer")
    read.fixed("mlp_only_layers", [], "llama.cpp's qwen2moe has experts in every layer")
    read.fixed("qkv_bias", True, "the model is published with no other")
    fields = decoder_fields(read)
    fix_head_dim(read, fields, "qwen2moe")
    return DecoderConfig(
        **fields,
        **expert_fields(read),
        **_qwen2moe_windows(read),
        moe_intermediate_size=read.size("moe_intermediate_size"),
        shared_expert_intermediate_size=read.size("shared_expert_intermediate_size"),
        norm_topk_prob=read.flag("norm_topk_prob", False),
        attention_bias=True,
    )


def _qwen2moe_windows(read: ConfigReader) -> dict[str, Any]:
    """Return the fields about windows: every other layer has one, up to max_window_layers."""
    used = read.flag("use_sliding_window", False)
    first_without = read.size("max_window_layers", least=0) if used else 0
    sliding = layers_of_kind(
        read, read.size("num_hidden_layers"), lambda layer: layer % 2 == 0 and layer < first_without
    )
    if used:
        return {"sliding_window": read.size("sliding_window"), "sliding_layers": sliding}
    if sliding:
        raise read.bad("layer_types", "no window where use_sliding_window is false: it would be empty")
    read.overruled("sliding_window", "max_window_layers")
    return {}


def _notes_of_unnormalised(config: DecoderConfig, options: NoOptions) -> tuple[str, ...]:
    """Return the notes of a family for which llama.cpp takes the weights of experts as they are."""
    if not config.norm_topk_prob:
        return decoder_notes(config)
    return (
        *decoder_notes(config),
        "norm_topk_prob is true: llama.cpp doesn't normalise the weights of experts of this architecture",
    )


_QWEN2MOE = decoder(
    "Qwen2MoeForCausalLM",
    gguf_name="qwen2moe",
    read_config=_read_qwen2moe,
    rules=(
        *mixture_decoder(expert_stacks(layers), needs_output=True),
        *shared_experts(layers, "shared_expert"),
        in_layer(layers, "ffn_gate_inp_shexp.weight", "mlp.shared_expert_gate.weight", "one hidden_size"),
    ),
    metadata=(*COMMON, EXPERT_WIDTH, SHARED_WIDTH),
    notes=_notes_of_unnormalised,
    says_norm=True,
)


# ---- OLMoE: queries and keys normed over all heads, experts of the width of a dense block in every layer


def _read_olmoe(raw: Mapping[str, Any], path: str | Path) -> DecoderConfig:
    """Return the configuration of an OLMoE."""
    read = with_defaults(raw, path)
    read.fixed("attention_bias", False, "llama.cpp's olmoe has none")
    read.fixed("clip_qkv", None, "llama.cpp's olmoe clips nothing")
    fields = decoder_fields(read)
    fix_head_dim(read, fields, "olmoe")
    heads = fields["num_attention_heads"]
    read.fixed("num_key_value_heads", heads, "llama.cpp's olmoe has as many as num_attention_heads")
    return DecoderConfig(
        **fields,
        **expert_fields(read),
        moe_intermediate_size=fields["intermediate_size"],
        norm_topk_prob=read.flag("norm_topk_prob", False),
        qk_norm=True,
        norms_all_heads=True,
    )


_OLMOE = decoder(
    "OlmoeForCausalLM",
    gguf_name="olmoe",
    read_config=_read_olmoe,
    rules=mixture_decoder(expert_stacks(layers), needs_output=True),
    notes=_notes_of_unnormalised,
    says_norm=True,
)


# ---- MiniMax-M2: partial RoPE, norms over the queries and keys of all heads, sigmoid routing with a bias


def _read_minimax_m2(raw: Mapping[str, Any], path: str | Path) -> DecoderConfig:
    """Return the configuration of a MiniMax-M2."""
    read = with_defaults(raw, path)
    read.fixed("use_qk_norm", True, "llama.cpp's minimax-m2 always norms queries and keys")
    read.fixed("qk_norm_type", "per_layer", "llama.cpp's minimax-m2 norms all heads together")
    read.fixed("use_routing_bias", True, "llama.cpp's minimax-m2 always chooses with a bias")
    read.fixed("scoring_func", "sigmoid", "the model computes with no other")
    fields = {**decoder_fields(read, theta=5e6), **expert_fields(read)}
    stated, head_dim = read.size_or_null("rotary_dim", None), fields["head_dim"]
    if stated is not None:
        # transformers takes partial_rotary_factor where it has both.
        by_share = stated if fields["rope"].partial is None else fields["rotated_cols"]
        if stated != by_share or stated > head_dim:
            raise read.bad("rotary_dim", f"columns of head_dim ({head_dim}), as partial_rotary_factor has it")
        fields["rotated_cols"] = stated
    return DecoderConfig(
        **fields,
        qk_norm=True,
        norms_all_heads=True,
        moe_intermediate_size=fields["intermediate_size"],
        scoring_func="sigmoid",
    )


_MINIMAX_M2 = decoder(
    "MiniMaxM2ForCausalLM",
    gguf_name="minimax-m2",
    read_config=_read_minimax_m2,
    rules=(
        *ends(needs_output=True),
        *attention(),
        norm_of_blocks(),
        in_layer(layers, "ffn_gate_inp.weight", "block_sparse_moe.gate.weight", "num_experts hidden_size"),
        in_layer(layers, "exp_probs_b.bias", "block_sparse_moe.e_score_correction_bias", "num_experts"),
        *sparse_moe_experts(layers),
    ),
    metadata=(*COMMON, EXPERT_WIDTH, ROTATED_COLS),
    canonical_name=sparse_moe_name,
    quirks=Quirks(pre_tokenizers={"gpt-4o": "minimax-m2"}),
    unset_gating="sigmoid",
)


# ---- GLM-4.5 and its successors: partial RoPE, sigmoid routing with a bias, a shared expert, an MTP layer


def _read_glm4moe(raw: Mapping[str, Any], path: str | Path) -> DecoderConfig:
    """Return the configuration of a GLM-4 with experts."""
    read = with_defaults(raw, path)
    fields = {**decoder_fields(read), **expert_fields(read)}
    mtp_key = "num_mtp_layers" if "num_mtp_layers" in raw else "num_nextn_predict_layers"
    read.overruled("num_nextn_predict_layers")
    return DecoderConfig(
        **fields,
        attention_bias=read.flag("attention_bias", False),
        qk_norm=read.flag("use_qk_norm", False),
        moe_intermediate_size=read.size("moe_intermediate_size"),
        num_shared_experts=read.size("n_shared_experts"),
        first_k_dense_replace=read.size("first_k_dense_replace", least=0),
        **group_fields(read),
        scoring_func="sigmoid",
        norm_topk_prob=read.flag("norm_topk_prob", True),
        routed_scaling_factor=read.number("routed_scaling_factor", 1.0),
        num_nextn_predict_layers=None if raw.get(mtp_key) is None else read.size(mtp_key, least=0),
    )


def _glm4moe_mtp(config: DecoderConfig, options: MTPOptions) -> int | None:
    """Return how many MTP layers the file has; None, to leave the key out, where they are not kept."""
    if options.mtp is False or config.num_nextn_predict_layers is None:
        return None
    return n_mtp_layers(config, options)


_GLM4MOE = decoder(
    "Glm4MoeForCausalLM",
    gguf_name="glm4moe",
    options=MTPOptions,
    read_config=_read_glm4moe,
    rules=(
        *dense_decoder(norm="post_attention_norm"),
        *biased_router(),
        *expert_stacks(moe_layers),
        *shared_experts(moe_layers),
        *mtp(),
    ),
    drops=mtp_drops,
    metadata=(
        *(key for key in COMMON if key is not GATING),
        ROTATED_COLS, EXPERT_WIDTH, SHARED_EXPERTS, DENSE_LAYERS, GATING, EXPERT_SCALE, EXPERT_NORM,
        Key(keys.NEXTN_PREDICT_LAYERS, Value.u32, _glm4moe_mtp),
    ),
    check=check_mtp,
    resolve_options=keep_last_mtp,
    quirks=GLM,
    unset_gating="sigmoid",
    says_norm=True,
)  # fmt: skip


# ---- Solar Open: a GLM-4.5 with experts in every layer, and without norms of queries and keys


def _read_solar(raw: Mapping[str, Any], path: str | Path) -> DecoderConfig:
    """Return the configuration of a Solar Open."""
    ConfigReader(raw, path).fixed("use_qk_norm", False, "the model computes without them")
    return _read_glm4moe(merged({"first_k_dense_replace": 0, "rope_theta": 1e6}, raw), path)


_SOLAR = replace(
    _GLM4MOE,
    hf_names=("SolarOpenForCausalLM",),
    read_config=_read_solar,
    quirks=Quirks(
        pre_tokenizers={"qwen2": "solar-open"},
        special_tokens={
            "eos": "<|endoftext|>", "eot": "<|endoftext|>", "unk": "<unk>", "bos": "<|startoftext|>",
        },
    ),
)  # fmt: skip


# ---- DeepSeek MoE: rotated rows change places, with shared and routed experts. Where this differs from
# llama.cpp's converter: rope.scaling.type says "linear" for a model stretched so, where that one writes
# "none" in any case.

_SCALINGS = ("default", "linear", "dynamic")
"""Kinds of RoPE that the model's own code has."""


def _read_deepseek(raw: Mapping[str, Any], path: str | Path) -> DecoderConfig:
    """Return the configuration of a DeepSeek MoE."""
    read = ConfigReader(raw, path)
    read.fixed("attention_bias", False, "llama.cpp's deepseek has no attention biases")
    read.fixed("moe_layer_freq", 1, "every layer after the leading dense ones is a mixture of experts")
    fields = decoder_fields(read)
    fix_head_dim(read, fields, "deepseek")
    if fields["rope"].kind not in _SCALINGS:
        raise UnsupportedCheckpoint(
            f"{path}: RoPE of type {quoted(fields['rope'].kind)}, expected one of {', '.join(_SCALINGS)}"
        )
    stated = raw.get("scoring_func") is not None
    return DecoderConfig(
        **fields,
        **expert_fields(read),
        moe_intermediate_size=read.size("moe_intermediate_size"),
        num_shared_experts=read.size("n_shared_experts"),
        first_k_dense_replace=read.size("first_k_dense_replace", 0, least=0),
        scoring_func=read.choice("scoring_func", ("softmax",)) if stated else None,
        norm_topk_prob=read.flag("norm_topk_prob", False),
    )


def _deepseek_notes(config: DecoderConfig, options: NoOptions) -> tuple[str, ...]:
    notes = list(decoder_notes(config))
    if config.norm_topk_prob:
        notes.append("norm_topk_prob is true: llama.cpp's deepseek doesn't normalise the weights of experts")
    if config.rope.kind == "linear":
        notes.append("rope.scaling.type is written as linear, where llama.cpp's converter writes none")
    return tuple(notes)


_DEEPSEEK = decoder(
    "DeepseekForCausalLM",
    gguf_name="deepseek",
    read_config=_read_deepseek,
    rules=(
        *dense_decoder(paired),
        in_layer(moe_layers, "ffn_gate_inp.weight", "mlp.gate.weight", "num_experts hidden_size"),
        *expert_stacks(moe_layers),
        *shared_experts(moe_layers),
    ),
    metadata=(
        *COMMON, ROTATED_COLS,
        Key(keys.ROPE_SCALING_TYPE, Value.string, lambda c, o: None if c.rope.kind == "linear" else "none"),
        DENSE_LAYERS, VOCAB_SIZE, EXPERT_WIDTH, EXPERT_SCALE, SHARED_EXPERTS,
    ),
    notes=_deepseek_notes,
    says_norm=True,
)  # fmt: skip


# ---- Ling and Ring 2 (Bailing MoE V2): queries, keys and values in one matrix, partial RoPE, sigmoid routing
# with a bias and groups. transformers has no class of it; defaults are those of the published code.


def _read_bailing2(raw: Mapping[str, Any], path: str | Path) -> DecoderConfig:
    """Return the configuration of a Bailing MoE V2."""
    read = ConfigReader(merged({"partial_rotary_factor": 0.5, "score_function": "sigmoid"}, raw), path)
    why = "llama.cpp's bailingmoe2 has no other"
    for key, value in (
        ("use_bias", False), ("use_qkv_bias", False), ("use_qk_norm", True), ("use_rmsnorm", True),
        ("norm_head", False), ("norm_softmax", False), ("use_sliding_window", False),
        ("norm_topk_prob", True), ("moe_router_enable_expert_bias", True), ("num_shared_experts", 1),
    ):  # fmt: skip
        read.fixed(key, value, why)
    read.overruled("sliding_window", "max_window_layers", "num_nextn_predict_layers", "router_dtype")
    fields = decoder_fields(read, theta=600000.0)
    fix_head_dim(read, fields, "bailingmoe2")
    width = read.size("moe_intermediate_size")
    return DecoderConfig(
        **fields,
        **expert_fields(read),
        qk_norm=True,
        moe_intermediate_size=width,
        num_shared_experts=read.size("num_shared_experts", 1),
        shared_expert_intermediate_size=read.size("moe_shared_expert_intermediate_size", width),
        first_k_dense_replace=read.size("first_k_dense_replace", 0, least=0),
        n_group=read.size("n_group", 8),
        topk_group=read.size("topk_group", 4),
        scoring_func=read.choice("score_function", ("sigmoid",)),
        routed_scaling_factor=read.number("routed_scaling_factor", 1.0),
        num_nextn_predict_layers=0,
    )


_of_bailing = respelled(
    ("model.word_embeddings.", "model.embed_tokens."),
    (".attention.query_key_value.", ".self_attn.qkv_proj."),
    (".attention.query_layernorm.", ".self_attn.q_norm."),
    (".attention.key_layernorm.", ".self_attn.k_norm."),
    (".attention.dense.", ".self_attn.o_proj."),
    (".mlp.gate.expert_bias", ".mlp.gate.e_score_correction_bias"),
)
"""Names of Bailing MoE V2 -> those that most families have."""


_BAILING2 = decoder(
    "BailingMoeV2ForCausalLM",
    gguf_name="bailingmoe2",
    read_config=_read_bailing2,
    rules=(
        *ends(needs_output=True),
        *fused_attention(),
        norm_of_blocks(),
        *dense_blocks(),
        *biased_router(),
        *expert_stacks(moe_layers),
        *shared_experts(moe_layers),
    ),
    metadata=(
        *COMMON, ROTATED_COLS, DENSE_LAYERS, VOCAB_SIZE, EXPERT_WIDTH,
        Key(keys.EXPERT_SHARED_FEED_FORWARD_LENGTH, Value.u32, lambda c, o: c.shared_intermediate_size),
        EXPERT_SCALE, SHARED_EXPERTS, EXPERT_NORM,
        Key(keys.NEXTN_PREDICT_LAYERS, Value.u32, lambda c, o: c.num_nextn_predict_layers),
    ),
    drops=lambda config, options: (INV_FREQ, drop_mtp(config, "by no option for this family")),
    canonical_name=_of_bailing,
    says_norm=True,
)  # fmt: skip


FAMILIES = (_QWEN3MOE, _QWEN2MOE, _OLMOE, _MINIMAX_M2, _GLM4MOE, _DEEPSEEK, _SOLAR, _BAILING2)
