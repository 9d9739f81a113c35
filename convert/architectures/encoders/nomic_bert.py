"""Nomic BERT: an encoder that rotates queries and keys, with gated blocks and a norm behind each part.

Names of weights and fields are those of the published models, which brought their own code. The variant with
experts is another architecture of llama.cpp.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from convert.architectures.base import Architecture, Key
from convert.architectures.config_reader import ConfigReader, merged
from convert.architectures.decoder.metadata import SIZES
from convert.architectures.decoder.rules import once, one
from convert.architectures.encoders.files import read_encoder
from convert.architectures.encoders.parts import EncoderConfig, encoder_fields, every_layer, in_full
from convert.architectures.rules import Rule
from gguf_tools.format import keys
from gguf_tools.format.values import Value

_FIXED = (
    ("moe_every_n_layers", 0, "has no experts"), ("num_experts", 0, "has no experts"),
    ("activation_function", "swiglu", "has no other activation"),
    ("hidden_act", "silu", "has no other activation"), ("causal", False, "is no decoder"),
    ("prenorm", False, "has norms behind attention and block"), ("parallel_block", False, "has none"),
    ("qkv_proj_bias", False, "has no biases"), ("mlp_fc1_bias", False, "has no biases"),
    ("mlp_fc2_bias", False, "has no biases"), ("use_rms_norm", False, "has another norm"),
    ("rotary_emb_fraction", 1.0, "rotates all columns"), ("rotary_emb_interleaved", False, "rotates halves"),
    ("rotary_emb_scale_base", None, "has none"), ("rotary_scaling_factor", None, "has none"),
    ("scale_attn_by_inverse_layer_idx", False, "has none"), ("scale_attn_weights", True, "scales scores"),
)  # fmt: skip
"""Field, the value that llama.cpp computes with, and why it has no other."""

_PUBLISHED = {
    "hidden_size": "n_embd", "num_attention_heads": "n_head", "intermediate_size": "n_inner",
    "num_hidden_layers": "n_layer", "max_position_embeddings": "n_positions",
    "layer_norm_eps": "layer_norm_epsilon",
}  # fmt: skip
"""Field of transformers' class -> what the published models call it."""

_OF_TRAINING = (
    "dense_seq_output", "embd_pdrop", "fused_bias_fc", "fused_dropout_add_ln", "layer_norm_training",
    "pad_vocab_size_multiple", "parallel_block_tied_norm", "reorder_and_upcast_attn", "summary_activation",
    "summary_first_dropout", "summary_proj_to_labels", "summary_type", "summary_use_proj", "use_flash_attn",
    "use_xentropy",
)  # fmt: skip
"""Fields that mean nothing for what is computed."""


@dataclass(frozen=True)
class NomicConfig(EncoderConfig):
    """Configuration of a Nomic BERT."""

    max_position_embeddings: int
    type_vocab_size: int
    layer_norm_eps: float
    theta: float


def _read_config(raw: Mapping[str, Any], path: str | Path) -> NomicConfig:
    """Return the configuration of a Nomic BERT, from the published names of fields or from transformers'.

    Its context is the length that it was trained on.
    """
    stated = {usual: raw.get(own) for usual, own in _PUBLISHED.items() if raw.get(own) is not None}
    read = ConfigReader(merged(raw, stated), path)
    for key, value, why in _FIXED:
        read.fixed(key, value, f"llama.cpp's nomic-bert {why}")
    read.overruled(*_OF_TRAINING)
    rope = ConfigReader(raw.get("rope_parameters") or {}, path, "rope_parameters.")
    rope.fixed("rope_type", "default", "llama.cpp's nomic-bert doesn't stretch the rotation")
    positions = read.size("max_position_embeddings")
    return NomicConfig(
        **encoder_fields(read, rotates=True),
        labels=(),
        max_position_embeddings=min(positions, read.size("max_trained_positions", 2048)),
        type_vocab_size=read.size("type_vocab_size"),
        layer_norm_eps=read.number("layer_norm_eps", 1e-12),
        theta=rope.number("rope_theta", read.number("rotary_emb_base", 1000.0)),
    )


def _in_layer(name: str, source: str, sizes: str) -> Rule:
    return one(every_layer, f"blk.{{layer}}.{name}", f"encoder.layers.{{layer}}.{source}", sizes)


_RULES: tuple[Rule, ...] = (
    one(once, "token_embd.weight", "embeddings.word_embeddings.weight", "vocab_size hidden_size"),
    one(once, "token_types.weight", "embeddings.token_type_embeddings.weight", "type_vocab_size hidden_size"),
    one(once, "token_embd_norm.weight", "emb_ln.weight", "hidden_size"),
    one(once, "token_embd_norm.bias", "emb_ln.bias", "hidden_size"),
    _in_layer("attn_qkv.weight", "attn.Wqkv.weight", "qkv_rows hidden_size"),
    _in_layer("attn_output.weight", "attn.out_proj.weight", "hidden_size hidden_size"),
    _in_layer("attn_output_norm.weight", "norm1.weight", "hidden_size"),
    _in_layer("attn_output_norm.bias", "norm1.bias", "hidden_size"),
    _in_layer("ffn_up.weight", "mlp.fc11.weight", "intermediate_size hidden_size"),
    _in_layer("ffn_gate.weight", "mlp.fc12.weight", "intermediate_size hidden_size"),
    _in_layer("ffn_down.weight", "mlp.fc2.weight", "hidden_size intermediate_size"),
    _in_layer("layer_output_norm.weight", "norm2.weight", "hidden_size"),
    _in_layer("layer_output_norm.bias", "norm2.bias", "hidden_size"),
)


_METADATA: tuple[Key, ...] = (
    Key(keys.BLOCK_COUNT, Value.u32, lambda c, o: c.num_hidden_layers),
    *SIZES,
    Key(keys.ROPE_FREQ_BASE, Value.f32, lambda c, o: c.theta),
    Key(keys.LAYERNORM_EPS, Value.f32, lambda c, o: c.layer_norm_eps),
    Key(keys.ATTENTION_CAUSAL, Value.bool_, lambda c, o: False),
    Key(keys.TOKENIZER_TYPE_COUNT, Value.u32, lambda c, o: c.type_vocab_size),
)

_NOMIC = Architecture(
    ("NomicBertModel",),
    "nomic-bert",
    _read_config,
    _RULES,
    _METADATA,
    forced_type=in_full,
    reader=read_encoder,
    encodes=True,
)

FAMILIES = (_NOMIC,)
