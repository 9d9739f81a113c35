"""OLMo 2 and 3: norms behind attention and block and none before, queries and keys normed over all heads.

OLMo 3 has windows in three of four layers, whose rotation is not stretched.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from convert.architectures.decoder.config import (
    DecoderConfig,
    decoder_fields,
    fix_head_dim,
    rotations_by_kind,
    windows_of,
    with_defaults,
)
from convert.architectures.decoder.family import WINDOWS, decoder, decoder_notes
from convert.architectures.decoder.metadata import COMMON, SLIDING_PATTERN, SLIDING_WINDOW, with_sliding_theta
from convert.architectures.decoder.rules import attention, dense_blocks, ends, in_layer, layers
from convert.architectures.rules import Rule

_THETA = 500000.0
"""Base of OLMo 3's rotation where config.json has none, as in transformers' class."""


def read_config(raw: Mapping[str, Any], path: str | Path) -> DecoderConfig:
    """Return the configuration of an OLMo 2 or 3."""
    windows: dict[str, Any] = {}
    if raw["architectures"][0] == "Olmo3ForCausalLM":
        windows["sliding_theta"], raw = rotations_by_kind(raw, path, _THETA, _THETA)
    read = with_defaults(raw, path)
    why = "llama.cpp's olmo2 has no other"
    for key, value in (("attention_bias", False), ("clip_qkv", None)):
        read.fixed(key, value, why)
    fields = decoder_fields(read)
    fix_head_dim(read, fields, "olmo2")
    if windows:
        sliding = windows_of(read, fields["num_hidden_layers"], lambda layer: bool((layer + 1) % 4))
        window = read.size("sliding_window", 4096)
        windows |= {"sliding_layers": sliding, "sliding_window": window if sliding else None}
    return DecoderConfig(**fields, **windows, qk_norm=True, norms_all_heads=True)


def _notes(config: DecoderConfig, options: Any) -> tuple[str, ...]:
    notes = decoder_notes(config, frozenset({WINDOWS}))
    theta = config.rope.theta
    if not config.sliding_layers or config.sliding_theta == theta:
        return notes
    return (
        *notes,
        f"layers with a window rotate with a rope_theta of {config.sliding_theta:g}; llama.cpp takes"
        f" {theta:g} for them too, that of the other layers, and rotates otherwise",
    )


def _without_first_norm(rules: tuple[Rule, ...]) -> tuple[Rule, ...]:
    return tuple(rule for rule in rules if "attn_norm" not in rule.outputs[0].name)


ARCHITECTURE = decoder(
    "Olmo2ForCausalLM",
    "Olmo3ForCausalLM",
    gguf_name="olmo2",
    read_config=read_config,
    rules=(
        *ends(needs_output=True),
        *_without_first_norm(attention()),
        in_layer(layers, "post_attention_norm.weight", "post_attention_layernorm.weight", "hidden_size"),
        in_layer(layers, "post_ffw_norm.weight", "post_feedforward_layernorm.weight", "hidden_size"),
        *dense_blocks(),
    ),
    metadata=(*with_sliding_theta(COMMON), SLIDING_WINDOW, SLIDING_PATTERN),
    notes=_notes,
)
