"""The tensors of DeepSeek V2 and V3: which weights they are made of, and which weights are left out.

Everything is renamed but for two things:

    kv_b_proj  (heads * (nope + v), kv_lora): per head its key rows, then its value rows. Multi-head latent
               attention multiplies queries with the key half transposed (attn_k_b: per head
               kv_lora x nope) and the attended latent with the value half (attn_v_b: per head
               v x kv_lora).
    experts    one matrix per expert in the checkpoint, one stack per layer in the file

The layouts of attention, tensors as (mats, rows, cols):

    split  attn_k_b (heads, kv_lora, nope), attn_v_b (heads, v, kv_lora)
    both   attn_kv_b (heads*(nope+v), kv_lora), attn_k_b (heads*kv_lora, nope), attn_v_b (heads*v, kv_lora).
           ik_llama.cpp reads it, llama.cpp does not.
    none   attn_kv_b. Both programs read it, as plain attention.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from convert.architectures.arrange import HeadRows, OutputTensor, TransposedHeadRows
from convert.architectures.deepseek2.config import DeepseekConfig
from convert.architectures.deepseek2.layer_ranges import (
    biased_moe_layers,
    dense_layers,
    full_q_layers,
    layers,
    layers_with,
    lora_q_layers,
    moe_layers,
    mtp_layers,
    once,
    untied,
)
from convert.architectures.options import LatentOptions
from convert.architectures.rules import Drop, Output, Rule, Where, renamed, stacked
from convert.weights.base import Weight

# ---- what becomes of kv_b_proj


def _keys(name: str, weights: Sequence[Weight], config: DeepseekConfig) -> TransposedHeadRows:
    """Return attn_k_b: every head's key rows, transposed; (n_heads, kv_lora_rank, qk_nope_head_dim)."""
    (weight,) = weights
    head_rows = config.qk_nope_head_dim + config.v_head_dim
    shape = (config.num_attention_heads, config.kv_lora_rank, config.qk_nope_head_dim)
    return TransposedHeadRows(name, shape, weight, head_rows, 0, config.qk_nope_head_dim)


def _values(name: str, weights: Sequence[Weight], config: DeepseekConfig) -> HeadRows:
    """Return attn_v_b: every head's value rows; (n_heads, v_head_dim, kv_lora_rank)."""
    (weight,) = weights
    head_rows = config.qk_nope_head_dim + config.v_head_dim
    shape = (config.num_attention_heads, config.v_head_dim, config.kv_lora_rank)
    return HeadRows(name, shape, weight, head_rows, config.qk_nope_head_dim, config.v_head_dim)


def _flat_keys(name: str, weights: Sequence[Weight], config: DeepseekConfig) -> OutputTensor:
    return _flat(_keys(name, weights, config))


def _flat_values(name: str, weights: Sequence[Weight], config: DeepseekConfig) -> OutputTensor:
    return _flat(_values(name, weights, config))


def _flat(tensor: HeadRows | TransposedHeadRows) -> OutputTensor:
    """Return the same rows as one matrix: head h has rows h*n_rows to (h+1)*n_rows."""
    n_mats, n_rows, n_cols = tensor.shape
    return replace(tensor, shape=(n_mats * n_rows, n_cols))


# ---- the rules


def _one(where: Where, name: str, source: str, sizes: str) -> Rule:
    return Rule(where, (Output(name, source, sizes),))


def _in_layer(where: Where, name: str, source: str, sizes: str) -> Rule:
    return _one(where, f"blk.{{layer}}.{name}", f"model.layers.{{layer}}.{source}", sizes)


def _of_model(name: str, source: str) -> Rule:
    """Return the rule of a matrix of the model that MTP layers may have again, or not (GLM-4.6)."""
    return replace(_in_layer(mtp_layers, name, source, "vocab_size hidden_size"), optional=True)


def _experts(where: Where, *parts: tuple[str, str, str]) -> Rule:
    """Return a rule that stacks the experts of a layer; its stacks are complete at the same moment."""
    prefix = "model.layers.{layer}.mlp.experts.{expert}"
    return Rule(where, tuple(
        Output(f"blk.{{layer}}.{name}", f"{prefix}.{source}", sizes, stacked) for name, source, sizes in parts
    ))  # fmt: skip


def _kv_b(mla: str, *parts: tuple[str, Any]) -> Rule:
    source = "model.layers.{layer}.self_attn.kv_b_proj.weight"
    return Rule(layers_with(mla), tuple(
        Output(f"blk.{{layer}}.{name}", source, "kv_b_rows kv_lora_rank", arrange) for name, arrange in parts
    ))  # fmt: skip


RULES: tuple[Rule, ...] = (
    _one(once, "token_embd.weight", "model.embed_tokens.weight", "vocab_size hidden_size"),
    _one(once, "output_norm.weight", "model.norm.weight", "hidden_size"),
    _one(untied, "output.weight", "lm_head.weight", "vocab_size hidden_size"),

    _in_layer(layers, "attn_norm.weight", "input_layernorm.weight", "hidden_size"),
    _in_layer(full_q_layers, "attn_q.weight", "self_attn.q_proj.weight", "q_rows hidden_size"),
    _in_layer(lora_q_layers, "attn_q_a.weight", "self_attn.q_a_proj.weight", "q_lora_rank hidden_size"),
    _in_layer(lora_q_layers, "attn_q_a_norm.weight", "self_attn.q_a_layernorm.weight", "q_lora_rank"),
    _in_layer(lora_q_layers, "attn_q_b.weight", "self_attn.q_b_proj.weight", "q_rows q_lora_rank"),
    _in_layer(layers, "attn_kv_a_mqa.weight", "self_attn.kv_a_proj_with_mqa.weight",
              "kv_a_rows hidden_size"),
    _in_layer(layers, "attn_kv_a_norm.weight", "self_attn.kv_a_layernorm.weight", "kv_lora_rank"),
    _kv_b("split", ("attn_k_b.weight", _keys), ("attn_v_b.weight", _values)),
    _kv_b("both", ("attn_kv_b.weight", renamed), ("attn_k_b.weight", _flat_keys),
          ("attn_v_b.weight", _flat_values)),
    _kv_b("none", ("attn_kv_b.weight", renamed)),
    _in_layer(layers, "attn_output.weight", "self_attn.o_proj.weight", "hidden_size attention_cols"),

    _in_layer(layers, "ffn_norm.weight", "post_attention_layernorm.weight", "hidden_size"),
    _in_layer(dense_layers, "ffn_gate.weight", "mlp.gate_proj.weight", "intermediate_size hidden_size"),
    _in_layer(dense_layers, "ffn_up.weight", "mlp.up_proj.weight", "intermediate_size hidden_size"),
    _in_layer(dense_layers, "ffn_down.weight", "mlp.down_proj.weight", "hidden_size intermediate_size"),

    _in_layer(moe_layers, "ffn_gate_inp.weight", "mlp.gate.weight", "n_routed_experts hidden_size"),
    _in_layer(biased_moe_layers, "exp_probs_b.bias", "mlp.gate.e_score_correction_bias",
              "n_routed_experts"),
    _experts(
        moe_layers,
        ("ffn_down_exps.weight", "down_proj.weight", "hidden_size moe_intermediate_size"),
        ("ffn_gate_exps.weight", "gate_proj.weight", "moe_intermediate_size hidden_size"),
        ("ffn_up_exps.weight", "up_proj.weight", "moe_intermediate_size hidden_size"),
    ),
    _in_layer(moe_layers, "ffn_gate_shexp.weight", "mlp.shared_experts.gate_proj.weight",
              "shared_intermediate_size hidden_size"),
    _in_layer(moe_layers, "ffn_up_shexp.weight", "mlp.shared_experts.up_proj.weight",
              "shared_intermediate_size hidden_size"),
    _in_layer(moe_layers, "ffn_down_shexp.weight", "mlp.shared_experts.down_proj.weight",
              "hidden_size shared_intermediate_size"),

    _of_model("nextn.embed_tokens.weight", "embed_tokens.weight"),
    _in_layer(mtp_layers, "nextn.enorm.weight", "enorm.weight", "hidden_size"),
    _in_layer(mtp_layers, "nextn.hnorm.weight", "hnorm.weight", "hidden_size"),
    _in_layer(mtp_layers, "nextn.eh_proj.weight", "eh_proj.weight", "hidden_size concat_size"),
    _in_layer(mtp_layers, "nextn.shared_head_norm.weight", "shared_head.norm.weight", "hidden_size"),
    _of_model("nextn.shared_head_head.weight", "shared_head.head.weight"),
)  # fmt: skip


def drops(config: DeepseekConfig, options: LatentOptions) -> tuple[Drop, ...]:
    """Return what this model's checkpoint may hold that the file does not need."""
    left_out = [Drop(lambda name: name.endswith(".rotary_emb.inv_freq"), "computed from rope_theta")]
    if config.tie_word_embeddings:
        left_out.append(
            Drop(lambda name: name == "lm_head.weight", "tied: the token embedding is the output layer")
        )
    if not options.mtp:
        left_out.append(Drop(
            lambda name: _layer_of(name) >= config.num_hidden_layers,
            "multi-token prediction layer; kept with --mtp",
        ))  # fmt: skip
    return tuple(left_out)


def _layer_of(name: str) -> int:
    """Return the layer that a weight belongs to, -1 for none."""
    match = re.match(r"model\.layers\.(\d{1,9})\.", name)
    return int(match[1]) if match else -1
