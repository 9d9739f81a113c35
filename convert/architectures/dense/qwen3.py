"""Qwen 3: queries and keys are normed per head, before they are rotated."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from convert.architectures.decoder.config import DecoderConfig, decoder_fields, window_fields, with_defaults
from convert.architectures.decoder.family import decoder
from convert.architectures.decoder.rules import attention, dense_blocks, ends, in_layer, layers


def read_config(raw: Mapping[str, Any], path: str | Path) -> DecoderConfig:
    """Return the configuration of a Qwen 3."""
    read = with_defaults(raw, path)
    biased = read.flag("attention_bias", False)
    return DecoderConfig(**decoder_fields(read), **window_fields(read), attention_bias=biased, qk_norm=True)


ARCHITECTURE = decoder(
    "Qwen3ForCausalLM",
    gguf_name="qwen3",
    read_config=read_config,
    rules=(
        *ends(),
        *attention(),
        in_layer(layers, "ffn_norm.weight", "post_attention_layernorm.weight", "hidden_size"),
        *dense_blocks(),
    ),
)
