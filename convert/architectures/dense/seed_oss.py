"""Seed-OSS: biases at queries, keys and values alone, and heads of a size of their own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from convert.architectures.decoder.config import DecoderConfig, decoder_fields, with_defaults
from convert.architectures.decoder.family import decoder
from convert.architectures.decoder.rules import attention, dense_blocks, ends, in_layer, layers


def read_config(raw: Mapping[str, Any], path: str | Path) -> DecoderConfig:
    """Return the configuration of a Seed-OSS."""
    read = with_defaults(raw, path)
    for key in ("attention_out_bias", "mlp_bias"):
        read.fixed(key, False, "llama.cpp's seed_oss has no such biases")
    return DecoderConfig(**decoder_fields(read), attention_bias=read.flag("attention_bias", True))


ARCHITECTURE = decoder(
    "SeedOssForCausalLM",
    gguf_name="seed_oss",
    read_config=read_config,
    rules=(
        *ends(),
        *attention(),
        in_layer(layers, "post_attention_norm.weight", "post_attention_layernorm.weight", "hidden_size"),
        *dense_blocks(),
    ),
)
