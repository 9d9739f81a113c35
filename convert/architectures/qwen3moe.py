"""Qwen 3 with routed experts in every layer, which a checkpoint stores one by one or in two stacks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from convert.architectures.decoder.config import DecoderConfig, decoder_fields, expert_fields, with_defaults
from convert.architectures.decoder.family import decoder, decoder_notes
from convert.architectures.decoder.metadata import COMMON, EXPERT_WIDTH
from convert.architectures.decoder.rules import attention, ends, expert_stacks, in_layer, layers
from convert.architectures.options import NoOptions
from convert.architectures.rules import HeadRows, Output, Rule
from convert.weights.base import Weight

_DEFAULTS: Mapping[str, Any] = {
    "max_position_embeddings": 32768, "num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8,
    "moe_intermediate_size": 768, "intermediate_size": 6144,
}  # fmt: skip

_STACK = "model.layers.{layer}.mlp.experts"
"""Beginning of the names of stacked experts, as transformers 5 may save them."""


def read_config(raw: Mapping[str, Any], path: str | Path) -> DecoderConfig:
    """Return the configuration of a Qwen 3 with experts."""
    read = with_defaults(raw, path, _DEFAULTS)
    read.fixed("decoder_sparse_step", 1, "llama.cpp's qwen3moe has experts in every layer")
    read.fixed("mlp_only_layers", [], "llama.cpp's qwen3moe has experts in every layer")
    read.fixed("use_sliding_window", False, "llama.cpp's qwen3moe has no sliding window")
    biased = read.flag("attention_bias", False)
    return DecoderConfig(
        **decoder_fields(read),
        **expert_fields(read),
        moe_intermediate_size=read.size("moe_intermediate_size"),
        norm_topk_prob=read.flag("norm_topk_prob", False),
        attention_bias=biased,
        output_bias=biased,
        qk_norm=True,
    )


def _gates(name: str, weights: Sequence[Weight], config: DecoderConfig) -> HeadRows:
    """Return the first half of every expert's rows of gate_up_proj, (experts, width, hidden_size)."""
    (weight,) = weights
    n_experts, n_rows, n_cols = weight.shape
    return HeadRows(name, (n_experts, n_rows // 2, n_cols), weight, n_rows, 0, n_rows // 2)


def _ups(name: str, weights: Sequence[Weight], config: DecoderConfig) -> HeadRows:
    """Return the second half of every expert's rows of gate_up_proj."""
    gates = _gates(name, weights, config)
    return replace(gates, first=gates.count)


def _notes(config: DecoderConfig, options: NoOptions) -> tuple[str, ...]:
    if config.norm_topk_prob:
        return decoder_notes(config)
    return (
        *decoder_notes(config),
        "norm_topk_prob is false: llama.cpp's qwen3moe normalises the weights of experts all the same",
    )


ARCHITECTURE = decoder(
    "Qwen3MoeForCausalLM",
    gguf_name="qwen3moe",
    read_config=read_config,
    rules=(
        *ends(),
        *attention(),
        in_layer(layers, "ffn_norm.weight", "post_attention_layernorm.weight", "hidden_size"),
        in_layer(layers, "ffn_gate_inp.weight", "mlp.gate.weight", "num_experts hidden_size"),
        replace(
            expert_stacks(layers, "mlp.experts.{expert}", down="down_proj", gate="gate_proj", up="up_proj",
                          order="down gate up"),
            unless=f"{_STACK}.gate_up_proj",
        ),
        Rule(layers, (
            Output("blk.{layer}.ffn_gate_exps.weight", f"{_STACK}.gate_up_proj",
                   "num_experts gate_up_rows hidden_size", _gates),
            Output("blk.{layer}.ffn_up_exps.weight", f"{_STACK}.gate_up_proj",
                   "num_experts gate_up_rows hidden_size", _ups),
        ), when=f"{_STACK}.gate_up_proj"),
        Rule(layers, (
            Output("blk.{layer}.ffn_down_exps.weight", f"{_STACK}.down_proj",
                   "num_experts hidden_size moe_intermediate_size"),
        ), when=f"{_STACK}.gate_up_proj"),
    ),
    metadata=(*COMMON, EXPERT_WIDTH),
    notes=_notes,
)  # fmt: skip
