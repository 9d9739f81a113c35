"""MiniMax-M2: partial RoPE, norms over the queries and keys of all heads, sigmoid routing with a bias."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from convert.architectures.decoder.config import DecoderConfig, decoder_fields, expert_fields, with_defaults
from convert.architectures.decoder.family import decoder
from convert.architectures.decoder.metadata import COMMON, EXPERT_WIDTH, ROTATED_COLS
from convert.architectures.decoder.rules import (
    attention,
    ends,
    in_layer,
    layers,
    sparse_moe_experts,
    sparse_moe_name,
)
from convert.tokenizer.files import Quirks


def read_config(raw: Mapping[str, Any], path: str | Path) -> DecoderConfig:
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


ARCHITECTURE = decoder(
    "MiniMaxM2ForCausalLM",
    gguf_name="minimax-m2",
    read_config=read_config,
    rules=(
        *ends(needs_output=True),
        *attention(),
        in_layer(layers, "ffn_norm.weight", "post_attention_layernorm.weight", "hidden_size"),
        in_layer(layers, "ffn_gate_inp.weight", "block_sparse_moe.gate.weight", "num_experts hidden_size"),
        in_layer(layers, "exp_probs_b.bias", "block_sparse_moe.e_score_correction_bias", "num_experts"),
        *sparse_moe_experts(layers),
    ),
    metadata=(*COMMON, EXPERT_WIDTH, ROTATED_COLS),
    canonical_name=sparse_moe_name,
    quirks=Quirks(pre_tokenizers={"gpt-4o": "minimax-m2"}),
)  # fmt: skip
