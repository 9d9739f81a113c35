"""SmolLM 3: a Llama whose every fourth layer rotates nothing."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from convert.architectures.decoder.config import DecoderConfig, decoder_fields, unrotated, with_defaults
from convert.architectures.decoder.family import decoder
from convert.architectures.decoder.metadata import COMMON, ROTATED_COLS, VOCAB_SIZE
from convert.architectures.decoder.rope import paired
from convert.architectures.decoder.rules import attention, dense_blocks, ends, in_layer, layers
from convert.tokenizer.files import LLAMA as LLAMA_QUIRKS
from gguf_tools.errors import UnsupportedCheckpoint


def read_config(raw: Mapping[str, Any], path: str | Path) -> DecoderConfig:
    """Return the configuration of a SmolLM 3."""
    read = with_defaults(raw, path)
    for key in ("attention_bias", "mlp_bias"):
        read.fixed(key, False, "llama.cpp's smollm3 has no biases")
    read.fixed("use_sliding_window", False, "llama.cpp's smollm3 has no sliding window")
    read.overruled("sliding_window", "layer_types")
    read.fixed("no_rope_layer_interval", 4, "llama.cpp's smollm3 rotates all but every fourth layer")
    fields = decoder_fields(read, theta=2e6)
    fields["rotated_cols"] = fields["head_dim"]
    layers_without = unrotated(fields["num_hidden_layers"])
    flags = raw.get("no_rope_layers")
    if flags is not None and flags != [int(n not in layers_without) for n in range(len(flags))]:
        raise UnsupportedCheckpoint(
            f"{path}: no_rope_layers leaves other layers unrotated than every fourth, which are llama.cpp's"
        )
    return DecoderConfig(**fields, unrotated_layers=layers_without)


ARCHITECTURE = decoder(
    "SmolLM3ForCausalLM",
    gguf_name="smollm3",
    read_config=read_config,
    rules=(
        *ends(),
        *attention(paired),
        in_layer(layers, "ffn_norm.weight", "post_attention_layernorm.weight", "hidden_size"),
        *dense_blocks(),
    ),
    metadata=(*COMMON, VOCAB_SIZE, ROTATED_COLS),
    quirks=LLAMA_QUIRKS,
)
