"""Qwen 2: queries, keys and values have biases, and no row changes its place."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from convert.architectures.decoder.config import (
    DecoderConfig,
    decoder_fields,
    fix_head_dim,
    window_fields,
    with_defaults,
)
from convert.architectures.decoder.family import decoder
from convert.architectures.decoder.rules import attention, dense_blocks, ends, in_layer, layers


def read_config(raw: Mapping[str, Any], path: str | Path) -> DecoderConfig:
    """Return the configuration of a Qwen 2."""
    read = with_defaults(raw, path)
    fields = decoder_fields(read)
    fix_head_dim(read, fields, "qwen2")
    return DecoderConfig(**fields, **window_fields(read), attention_bias=True)


ARCHITECTURE = decoder(
    "Qwen2ForCausalLM",
    gguf_name="qwen2",
    read_config=read_config,
    rules=(
        *ends(),
        *attention(),
        in_layer(layers, "ffn_norm.weight", "post_attention_layernorm.weight", "hidden_size"),
        *dense_blocks(),
    ),
)
