"""ModernBERT: an encoder that rotates queries and keys, and sees a window in most layers.

Every third layer sees all of a text, with a base of rotation of its own. A block's first matrix holds what is
activated, and then the gate. llama.cpp computes it as `modern-bert`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from convert.architectures.base import Architecture, Key
from convert.architectures.config_reader import MAX_LAYERS, ConfigReader
from convert.architectures.decoder.config import FULL, SLIDING, layers_of_kind, with_defaults
from convert.architectures.decoder.metadata import SIZES, VOCAB_SIZE
from convert.architectures.decoder.rules import layers_if, once, one
from convert.architectures.encoders.files import read_encoder
from convert.architectures.encoders.parts import (
    CLASSIFIER,
    LABELS,
    EncoderConfig,
    encoder_fields,
    every_layer,
    read_labels,
)
from convert.architectures.options import NoOptions
from convert.architectures.rules import Drop, Rule
from convert.tokenizer.files import Quirks
from gguf_tools.errors import BadConfig
from gguf_tools.format import keys
from gguf_tools.format.values import Value

_POOLINGS: Mapping[str, int] = {"cls": 2, "mean": 1}
"""Pooling that a classifier begins with, by its number in the file."""


@dataclass(frozen=True)
class ModernBertConfig(EncoderConfig):
    """Configuration of a ModernBERT.

    theta, local_theta  bases of rotation, of layers that see all of a text and of those with a window
    window              tokens that a layer with a window sees, half of them on each side
    period              every so many layers one sees all of a text, the first one among them; None where
                        layers are in another order
    local_layers        the layers with a window
    """

    max_position_embeddings: int
    norm_eps: float
    theta: float
    local_theta: float
    window: int
    period: int | None
    local_layers: tuple[int, ...]
    activation: str
    pooling: str
    is_classifier: bool

    @property
    def both_rows(self) -> int:
        """Rows of Wi: what is activated, then the gate."""
        return 2 * self.intermediate_size

    @property
    def pattern(self) -> Value:
        """How layers with a window are told: by the period, or one by one."""
        if self.period is not None:
            return Value.u32(self.period)
        return Value.bools(layer in self.local_layers for layer in range(self.num_hidden_layers))


def _read_config(raw: Mapping[str, Any], path: str | Path) -> ModernBertConfig:
    """Return the configuration of a ModernBERT."""
    read = with_defaults(raw, path)
    is_classifier = str(raw["architectures"][0]).endswith(CLASSIFIER)
    for key in ("attention_bias", "mlp_bias", "norm_bias", *(("classifier_bias",) if is_classifier else ())):
        read.fixed(key, False, "llama.cpp's modern-bert has no such biases")
    if is_classifier:
        read.fixed("classifier_activation", "gelu", "llama.cpp's modern-bert has no other")
    read.overruled(
        "layer_norm_eps", "classifier_activation", "classifier_bias", "decoder_bias", "tie_word_embeddings"
    )
    n_layers, stated = read.size("num_hidden_layers", most=MAX_LAYERS), raw.get("global_attn_every_n_layers")
    period = read.size("global_attn_every_n_layers", 3)
    local = layers_of_kind(read, n_layers, lambda layer: layer % period > 0)
    is_regular = local == tuple(layer for layer in range(n_layers) if layer % period)
    if stated is not None and not is_regular:
        raise read.bad("global_attn_every_n_layers", "what layer_types says")
    return ModernBertConfig(
        **encoder_fields(read, rotates=True),
        max_position_embeddings=read.size("max_position_embeddings"),
        norm_eps=read.number("norm_eps", 1e-5),
        theta=_theta(read, FULL, "global_rope_theta", 160000.0),
        local_theta=_theta(read, SLIDING, "local_rope_theta", 10000.0),
        window=read.size("local_attention", 128),
        period=period if is_regular else None,
        local_layers=local,
        activation=read.choice("hidden_activation", ("gelu", "silu")),
        pooling=read.choice("classifier_pooling", ("cls", "mean")),
        labels=read_labels(read, is_classifier=is_classifier),
        is_classifier=is_classifier,
    )


def _theta(read: ConfigReader, kind: str, older: str, default: float) -> float:
    """Return the base of rotation of a kind of layers, from where transformers 5 or 4 have it."""
    stated = read.raw.get("rope_parameters") or {}
    try:
        own = ConfigReader(stated.get(kind) or {}, read.path, f"rope_parameters.{kind}.")
        own.fixed("rope_type", "default", "llama.cpp's modern-bert doesn't stretch the rotation")
        return own.number("rope_theta", read.number(older, default))
    except (AttributeError, TypeError) as cause:
        raise BadConfig(f"{read.path}: rope_parameters has no object for {kind}") from cause


# ---- tensors


def _in_layer(name: str, source: str, sizes: str) -> Rule:
    return one(every_layer, f"blk.{{layer}}.{name}.weight", f"model.layers.{{layer}}.{source}.weight", sizes)


def _first(config: ModernBertConfig, options: NoOptions) -> Iterable[int]:
    return (0,)


def _later(config: ModernBertConfig, options: NoOptions) -> Iterable[int]:
    return range(1, config.num_hidden_layers)


_NORM = ("blk.{layer}.attn_norm.weight", "model.layers.{layer}.attn_norm.weight", "hidden_size")
_classified = layers_if("is_classifier", once)

_RULES: tuple[Rule, ...] = (
    one(once, "token_embd.weight", "model.embeddings.tok_embeddings.weight", "vocab_size hidden_size"),
    one(once, "token_embd_norm.weight", "model.embeddings.norm.weight", "hidden_size"),
    Rule(_first, one(once, *_NORM).outputs, optional=True),
    one(_later, *_NORM),
    _in_layer("attn_qkv", "attn.Wqkv", "qkv_rows hidden_size"),
    _in_layer("attn_output", "attn.Wo", "hidden_size hidden_size"),
    _in_layer("ffn_norm", "mlp_norm", "hidden_size"),
    _in_layer("ffn_up", "mlp.Wi", "both_rows hidden_size"),
    _in_layer("ffn_down", "mlp.Wo", "hidden_size intermediate_size"),
    one(once, "output_norm.weight", "model.final_norm.weight", "hidden_size"),
    one(_classified, "cls.weight", "head.dense.weight", "hidden_size hidden_size"),
    one(_classified, "cls.norm.weight", "head.norm.weight", "hidden_size"),
    one(_classified, "cls.output.weight", "classifier.weight", "num_labels hidden_size"),
    one(_classified, "cls.output.bias", "classifier.bias", "num_labels"),
)

_PREDICTS = re.compile(r"^(?:head|decoder)\.")


def _drops(config: ModernBertConfig, options: NoOptions) -> tuple[Drop, ...]:
    return (
        Drop(lambda name: bool(_PREDICTS.match(name)), "predicts masked words; a text's vector needs it not"),
    )


_METADATA: tuple[Key, ...] = (
    Key(keys.BLOCK_COUNT, Value.u32, lambda c, o: c.num_hidden_layers),
    *SIZES,
    Key(keys.ROPE_FREQ_BASE, Value.f32, lambda c, o: c.theta),
    Key(keys.ROPE_FREQ_BASE_SWA, Value.f32, lambda c, o: c.local_theta),
    Key(
        keys.LAYERNORM_RMS_EPS, Value.f32, lambda c, o: c.norm_eps
    ),  # which llama.cpp's converter writes, too
    Key(keys.LAYERNORM_EPS, Value.f32, lambda c, o: c.norm_eps),
    Key(keys.ATTENTION_CAUSAL, Value.bool_, lambda c, o: False),
    Key(keys.CLASSIFIER_POOLING_TYPE, Value.u32, lambda c, o: _POOLINGS[c.pooling]),
    LABELS,
    Key(keys.SLIDING_WINDOW, Value.u32, lambda c, o: c.window),
    Key(keys.SLIDING_WINDOW_PATTERN, lambda value: value, lambda c, o: c.pattern),
    Key(keys.ROPE_SCALING_TYPE, Value.string, lambda c, o: "none"),
    VOCAB_SIZE,
    Key(keys.HIDDEN_ACTIVATION, Value.string, lambda c, o: c.activation),
)

_MODERN_BERT = Architecture(
    ("ModernBertModel", "ModernBertForMaskedLM", f"ModernBert{CLASSIFIER}"),
    "modern-bert",
    _read_config,
    _RULES,
    _METADATA,
    drops=_drops,
    quirks=Quirks(pre_tokenizers={"gpt-2": "modern-bert"}),
    reader=read_encoder,
    windows="unstretched",
    window_theta=10000.0,
    encodes=True,
)

FAMILIES = (_MODERN_BERT,)
