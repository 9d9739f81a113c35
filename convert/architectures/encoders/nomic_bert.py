"""Nomic BERT: an encoder that rotates queries and keys, with gated blocks and a norm behind each part.

Names of weights and fields are those of the published models, which brought their own code. The variant with
experts is another architecture of llama.cpp. It has biases and blocks without gates, and experts in one layer
of so many, the second one first. The published model adds a bias to the sum of experts, which llama.cpp
doesn't: its converter leaves the bias out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from convert.architectures.base import Architecture, Key
from convert.architectures.config_reader import MAX_EXPERTS, ConfigReader, merged
from convert.architectures.decoder.metadata import EXPERTS, SIZES, USED_EXPERTS
from convert.architectures.decoder.rules import once, one
from convert.architectures.encoders.files import read_encoder
from convert.architectures.encoders.parts import EncoderConfig, encoder_fields, every_layer, in_full
from convert.architectures.options import NoOptions
from convert.architectures.rules import Arrange, Drop, OutputTensor, Renamed, Rule, renamed
from convert.tokenizer.files import Quirks
from convert.weights.base import Weight
from gguf_tools.format import keys
from gguf_tools.format.values import Value
from quantize.fill.sources import TransposedHeads

_FIXED = (
    ("causal", False, "is no decoder"), ("prenorm", False, "has norms behind attention and block"),
    ("parallel_block", False, "has none"), ("use_rms_norm", False, "has another norm"),
    ("rotary_emb_fraction", 1.0, "rotates all columns"), ("rotary_emb_interleaved", False, "rotates halves"),
    ("rotary_emb_scale_base", None, "has none"), ("rotary_scaling_factor", None, "has none"),
    ("scale_attn_by_inverse_layer_idx", False, "has none"), ("scale_attn_weights", True, "scales scores"),
)  # fmt: skip
"""Field, the value that llama.cpp computes with, and why it has no other."""

_STATED_CONTEXT, _CONTEXT = 2048, 512
"""The context that the published model with experts states, and the length that it was trained on."""

_BIASES = ("qkv_proj_bias", "mlp_fc1_bias", "mlp_fc2_bias")

_WITHOUT_EXPERTS = (
    ("moe_every_n_layers", 0, "has no experts"), ("num_experts", 0, "has no experts"),
    ("activation_function", "swiglu", "has no other activation"),
    ("hidden_act", "silu", "has no other activation"), *((key, False, "has no biases") for key in _BIASES),
)  # fmt: skip
_WITH_EXPERTS = (
    ("num_shared_experts", 0, "has none"), ("expert_choice_router", False, "lets tokens choose experts"),
    ("moe_normalize_expert_weights", False, "takes the weights of experts as they are"),
    ("ffn_div", 1, "has experts as wide as blocks"),
    ("activation_function", "gelu", "has no other activation"),
    ("hidden_act", "gelu", "has no other activation"), *((key, True, "has biases") for key in _BIASES),
)  # fmt: skip

_PUBLISHED = {
    "hidden_size": "n_embd", "num_attention_heads": "n_head", "intermediate_size": "n_inner",
    "num_hidden_layers": "n_layer", "max_position_embeddings": "n_positions",
    "layer_norm_eps": "layer_norm_epsilon",
}  # fmt: skip
"""Field of transformers' class -> what the published models call it."""

_OF_TRAINING = (
    "add_pooling_layer", "dense_seq_output", "embd_pdrop", "fused_bias_fc", "fused_dropout_add_ln",
    "layer_norm_training", "moe_impl", "moe_resid_pdrop", "pad_vocab_size_multiple",
    "parallel_block_tied_norm", "reorder_and_upcast_attn", "summary_activation", "summary_first_dropout",
    "summary_proj_to_labels", "summary_type", "summary_use_proj", "use_flash_attn", "use_xentropy",
)  # fmt: skip
"""Fields that mean nothing for what is computed."""


@dataclass(frozen=True)
class NomicConfig(EncoderConfig):
    """Configuration of a Nomic BERT; `moe_step` is 0 for one without experts."""

    max_position_embeddings: int
    type_vocab_size: int
    layer_norm_eps: float
    theta: float
    moe_step: int = 0
    num_experts: int = 0
    num_experts_per_tok: int = 0

    @property
    def expert_rows(self) -> int:
        """Rows of a matrix of all experts of a layer."""
        return self.num_experts * self.intermediate_size


def _read_config(raw: Mapping[str, Any], path: str | Path) -> NomicConfig:
    """Return the configuration of a Nomic BERT, from the published names of fields or from transformers'.

    Its context is the length that it was trained on.
    """
    return _read(raw, path, "nomic-bert", _WITHOUT_EXPERTS, theta=1000.0)


def _read_mixture(raw: Mapping[str, Any], path: str | Path) -> NomicConfig:
    """Return the configuration of a Nomic BERT with experts."""
    read = ConfigReader(raw, path)
    n_experts = read.size("num_experts", most=MAX_EXPERTS)
    config = _read(raw, path, "nomic-bert-moe", _WITH_EXPERTS, theta=10000.0)
    context = config.max_position_embeddings
    return replace(
        config,
        max_position_embeddings=_CONTEXT if context == _STATED_CONTEXT else context,
        moe_step=read.size("moe_every_n_layers"),
        num_experts=n_experts,
        num_experts_per_tok=read.size("moe_top_k", 1, most=n_experts),
    )


def _read(
    raw: Mapping[str, Any], path: str | Path, name: str, fixed: Iterable[tuple[str, Any, str]], theta: float
) -> NomicConfig:
    """Return the fields that both kinds have; theta is the base of the rotation where nothing says it."""
    stated = {usual: raw.get(own) for usual, own in _PUBLISHED.items() if raw.get(own) is not None}
    read = ConfigReader(merged(raw, stated), path)
    for key, value, why in (*_FIXED, *fixed):
        read.fixed(key, value, f"llama.cpp's {name} {why}")
    read.overruled(*_OF_TRAINING)
    rope = ConfigReader(raw.get("rope_parameters") or {}, path, "rope_parameters.")
    rope.fixed("rope_type", "default", f"llama.cpp's {name} doesn't stretch the rotation")
    positions = read.size("max_position_embeddings")
    return NomicConfig(
        **encoder_fields(read, rotates=True),
        labels=(),
        max_position_embeddings=min(positions, read.size("max_trained_positions", 2048)),
        type_vocab_size=read.size("type_vocab_size"),
        layer_norm_eps=read.number("layer_norm_eps", 1e-12),
        theta=rope.number("rope_theta", read.number("rotary_emb_base", theta)),
    )


Where = Callable[[NomicConfig, NoOptions], Iterable[int]]


def _routed(config: NomicConfig, options: NoOptions) -> Iterable[int]:
    """Return the layers with experts."""
    return (layer for layer in range(config.num_hidden_layers) if layer % config.moe_step == 1)


def _dense(config: NomicConfig, options: NoOptions) -> Iterable[int]:
    return (layer for layer in range(config.num_hidden_layers) if layer % config.moe_step != 1)


def _in_layer(
    name: str, source: str, sizes: str, where: Where = every_layer, arrange: Arrange = renamed
) -> Rule:
    return one(where, f"blk.{{layer}}.{name}", f"encoder.layers.{{layer}}.{source}", sizes, arrange)


def _up(name: str, weights: Sequence[Weight], config: NomicConfig) -> OutputTensor:
    """Return the first matrices of all experts, (experts, width, hidden_size)."""
    (weight,) = weights
    shape = (config.num_experts, config.intermediate_size, config.hidden_size)
    return Renamed(name, shape, weight.type, weight)


def _down(name: str, weights: Sequence[Weight], config: NomicConfig) -> OutputTensor:
    """Return the second matrices of all experts, (experts, hidden_size, width), which are stored turned."""
    (weight,) = weights
    width = config.intermediate_size
    shape = (config.num_experts, config.hidden_size, width)
    return TransposedHeads(name, shape, weight, width, 0, width)


_RULES: tuple[Rule, ...] = (
    one(once, "token_embd.weight", "embeddings.word_embeddings.weight", "vocab_size hidden_size"),
    one(once, "token_types.weight", "embeddings.token_type_embeddings.weight", "type_vocab_size hidden_size"),
    one(once, "token_embd_norm.weight", "emb_ln.weight", "hidden_size"),
    one(once, "token_embd_norm.bias", "emb_ln.bias", "hidden_size"),
    _in_layer("attn_qkv.weight", "attn.Wqkv.weight", "qkv_rows hidden_size"),
    _in_layer("attn_output.weight", "attn.out_proj.weight", "hidden_size hidden_size"),
    _in_layer("attn_output_norm.weight", "norm1.weight", "hidden_size"),
    _in_layer("attn_output_norm.bias", "norm1.bias", "hidden_size"),
    _in_layer("layer_output_norm.weight", "norm2.weight", "hidden_size"),
    _in_layer("layer_output_norm.bias", "norm2.bias", "hidden_size"),
)
"""Rules of both kinds."""

_GATED: tuple[Rule, ...] = (
    _in_layer("ffn_up.weight", "mlp.fc11.weight", "intermediate_size hidden_size"),
    _in_layer("ffn_gate.weight", "mlp.fc12.weight", "intermediate_size hidden_size"),
    _in_layer("ffn_down.weight", "mlp.fc2.weight", "hidden_size intermediate_size"),
)
_MIXTURE: tuple[Rule, ...] = (
    _in_layer("attn_qkv.bias", "attn.Wqkv.bias", "qkv_rows"),
    _in_layer("attn_output.bias", "attn.out_proj.bias", "hidden_size"),
    _in_layer("ffn_up.weight", "mlp.fc1.weight", "intermediate_size hidden_size", _dense),
    _in_layer("ffn_up.bias", "mlp.fc1.bias", "intermediate_size", _dense),
    _in_layer("ffn_down.weight", "mlp.fc2.weight", "hidden_size intermediate_size", _dense),
    _in_layer("ffn_down.bias", "mlp.fc2.bias", "hidden_size", _dense),
    _in_layer("ffn_gate_inp.weight", "mlp.router.layer.weight", "num_experts hidden_size", _routed),
    _in_layer("ffn_up_exps.weight", "mlp.experts.mlp.w1", "expert_rows hidden_size", _routed, _up),
    _in_layer("ffn_down_exps.weight", "mlp.experts.mlp.w2", "expert_rows hidden_size", _routed, _down),
)


def _drops(config: NomicConfig, options: NoOptions) -> tuple[Drop, ...]:
    why = "added to the sum of experts; llama.cpp adds none, so vectors differ a little"
    return (Drop(lambda name: name.endswith(".mlp.experts.bias"), why),)


_METADATA: tuple[Key, ...] = (
    Key(keys.BLOCK_COUNT, Value.u32, lambda c, o: c.num_hidden_layers),
    *SIZES,
    Key(keys.ROPE_FREQ_BASE, Value.f32, lambda c, o: c.theta),
    Key(keys.LAYERNORM_EPS, Value.f32, lambda c, o: c.layer_norm_eps),
    EXPERTS,
    Key(keys.ATTENTION_CAUSAL, Value.bool_, lambda c, o: False),
    Key(keys.MOE_EVERY_N_LAYERS, Value.u32, lambda c, o: c.moe_step or None),
    USED_EXPERTS,
    Key(keys.TOKENIZER_TYPE_COUNT, Value.u32, lambda c, o: c.type_vocab_size),
)

_NOMIC = Architecture(
    ("NomicBertModel",),
    "nomic-bert",
    _read_config,
    (*_RULES, *_GATED),
    _METADATA,
    forced_type=in_full,
    reader=read_encoder,
    encodes=True,
)

_NOMIC_MOE = replace(
    _NOMIC,
    gguf_name="nomic-bert-moe",
    read_config=_read_mixture,
    rules=(*_RULES, *_MIXTURE),
    drops=_drops,
    quirks=Quirks(fairseq_mask=True),
    says_norm=True,
)


def choose(config: Mapping[str, Any]) -> Architecture:
    """Return the family under the name that llama.cpp has for a model with this config.json."""
    return _NOMIC_MOE if config.get("moe_every_n_layers") else _NOMIC


FAMILIES = (_NOMIC, _NOMIC_MOE)
