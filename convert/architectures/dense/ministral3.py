"""Ministral 3 and Mistral Small 3.1 and 3.2: a Llama beside a vision part, whose attention may grow sharper.

In Ministral 3, scores are multiplied by a number that grows with the position, from the end of the context on
that the model had before it was stretched.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from convert.architectures.base import Key
from convert.architectures.config_reader import ConfigReader
from convert.architectures.decoder.config import DecoderConfig, decoder_fields, with_defaults
from convert.architectures.decoder.family import LLAMA3, RAMP, decoder
from convert.architectures.decoder.metadata import COMMON, ROTATED_COLS, VOCAB_SIZE
from convert.architectures.decoder.rope import LLAMA3_ROTATION, paired
from convert.architectures.decoder.rules import attention, dense_blocks, ends, in_layer, layers
from convert.architectures.gemma.gemma3 import vision_drops
from convert.tokenizer.files import LLAMA as LLAMA_QUIRKS
from gguf_tools.errors import UnsupportedCheckpoint
from gguf_tools.format import keys
from gguf_tools.format.values import Value
from gguf_tools.text import quoted


def read_config(raw: Mapping[str, Any], path: str | Path) -> DecoderConfig:
    """Return the configuration of the text part."""
    kind = raw.get("model_type")
    if kind == "mistral4":
        raise UnsupportedCheckpoint(f"{path}: model_type is 'mistral4', expected 'ministral3' or 'mistral'")
    read = with_defaults(raw, path, name=f"{'Ministral3' if kind == 'ministral3' else 'Mistral'}ForCausalLM")
    read.fixed("sliding_window", None, "llama.cpp's mistral3 has none")
    fields = decoder_fields(read)
    fields["rotated_cols"] = fields["head_dim"]
    if kind != "ministral3":
        return DecoderConfig(**fields)
    rope = fields["rope"]
    if rope.kind != "yarn" or not rope.mscale_all_dim or rope.mscale != 1.0:
        raise UnsupportedCheckpoint(
            f"{path}: rope_parameters of type {quoted(rope.kind)} with mscale {rope.mscale} and"
            f" mscale_all_dim {rope.mscale_all_dim}, expected 'yarn' with an mscale of 1: llama.cpp has no"
            " other"
        )
    inside = ConfigReader(raw.get("rope_parameters") or raw["rope_scaling"], path, "rope_parameters.")
    grows = inside.number("llama_4_scaling_beta"), rope.original_context
    fields["rope"] = replace(rope, log_multiplier=rope.mscale_all_dim)
    return DecoderConfig(**fields, sharpness=grows)


ARCHITECTURE = decoder(
    "Ministral3ForCausalLM",
    "Mistral3ForConditionalGeneration",
    gguf_name="mistral3",
    read_config=read_config,
    rules=(
        LLAMA3_ROTATION,
        *ends(),
        *attention(paired),
        in_layer(layers, "ffn_norm.weight", "post_attention_layernorm.weight", "hidden_size"),
        *dense_blocks(),
    ),
    metadata=(
        *COMMON, VOCAB_SIZE, ROTATED_COLS,
        Key(keys.ROPE_SCALING_YARN_LOG_MUL, Value.f32, lambda c, o: c.rope.log_multiplier),
        Key(keys.TEMPERATURE_SCALE, Value.f32, lambda c, o: c.sharpness and c.sharpness[0]),
    ),
    drops=vision_drops,
    says=frozenset({LLAMA3, RAMP}),
    quirks=LLAMA_QUIRKS,
)  # fmt: skip
