"""Qwen 3 with routed experts in every layer, which a checkpoint stores one by one or in two stacks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from convert.architectures.decoder.config import DecoderConfig, decoder_fields, expert_fields, with_defaults
from convert.architectures.decoder.family import decoder, decoder_notes
from convert.architectures.decoder.metadata import COMMON, EXPERT_WIDTH
from convert.architectures.decoder.rules import attention, ends, expert_stacks, in_layer, layers
from convert.architectures.options import NoOptions


def read_config(raw: Mapping[str, Any], path: str | Path) -> DecoderConfig:
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
        *expert_stacks(layers),
    ),
    metadata=(*COMMON, EXPERT_WIDTH),
    notes=_notes,
)  # fmt: skip
