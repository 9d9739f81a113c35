"""Llama, Mistral and Mixtral: rows of queries and keys change places, and Llama 3's RoPE becomes a tensor."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from convert.architectures.decoder.config import DecoderConfig, decoder_fields, expert_fields, with_defaults
from convert.architectures.decoder.family import LLAMA3, decoder
from convert.architectures.decoder.metadata import COMMON, ROTATED_COLS, VOCAB_SIZE
from convert.architectures.decoder.rope import LLAMA3_ROTATION, paired
from convert.architectures.decoder.rules import (
    attention,
    dense_blocks,
    ends,
    in_layer,
    layers,
    moe_layers,
    sparse_moe_experts,
    sparse_moe_name,
)
from convert.tokenizer.files import LLAMA as LLAMA_QUIRKS

LLAMA, MISTRAL, MIXTRAL = "LlamaForCausalLM", "MistralForCausalLM", "MixtralForCausalLM"


def read_config(raw: Mapping[str, Any], path: str | Path) -> DecoderConfig:
    """Return the configuration of a Llama, Mistral or Mixtral."""
    name = str(raw["architectures"][0])
    read = with_defaults(raw, path)
    fields = decoder_fields(read, theta=1e6 if name == MIXTRAL else 10000.0)
    fields["rotated_cols"] = fields["head_dim"]
    if name == MIXTRAL:
        fields |= expert_fields(read)
        fields["moe_intermediate_size"] = fields["intermediate_size"]
    if name == LLAMA:
        fields["stated_head_dim"] = fields["head_dim"]
        fields["attention_bias"] = fields["output_bias"] = read.flag("attention_bias", False)
        fields["mlp_bias"] = read.flag("mlp_bias", False)
    else:
        fields["sliding_window"] = read.size_or_null("sliding_window", None)
        fields["sliding_layers"] = tuple(range(fields["num_hidden_layers"]))
    return DecoderConfig(**fields)


ARCHITECTURE = decoder(
    LLAMA, MISTRAL, MIXTRAL,
    gguf_name="llama",
    read_config=read_config,
    rules=(
        LLAMA3_ROTATION,
        *ends(),
        *attention(paired),
        in_layer(layers, "ffn_norm.weight", "post_attention_layernorm.weight", "hidden_size"),
        *dense_blocks("mlp_bias"),
        in_layer(moe_layers, "ffn_gate_inp.weight", "block_sparse_moe.gate.weight",
                 "num_experts hidden_size"),
        *sparse_moe_experts(moe_layers),
    ),
    metadata=(*COMMON, VOCAB_SIZE, ROTATED_COLS),
    canonical_name=sparse_moe_name,
    says=frozenset({LLAMA3}),
    quirks=LLAMA_QUIRKS,
)  # fmt: skip
