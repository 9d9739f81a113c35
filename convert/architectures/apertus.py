"""Apertus: blocks without a gate, whose activation has numbers of its own in every layer.

The activation is xIELU (arXiv 2411.13010). Its numbers stand beside the weights in the checkpoint; the file
has them as keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from convert.architectures.base import Architecture, Key
from convert.architectures.config_reader import ConfigReader, merged
from convert.architectures.decoder.config import DecoderConfig, decoder_fields, with_defaults
from convert.architectures.decoder.family import LLAMA3, decoder
from convert.architectures.decoder.metadata import COMMON, ROTATED_COLS, VOCAB_SIZE, read_decoder
from convert.architectures.decoder.rope import LLAMA3_ROTATION
from convert.architectures.decoder.rules import (
    INV_FREQ,
    dense_decoder,
    respelled,
)
from convert.architectures.rules import Drop
from convert.architectures.stored_names import Renaming
from convert.tokenizer.files import LLAMA
from gguf_tools.errors import UnsupportedCheckpoint
from gguf_tools.format import keys
from gguf_tools.format.hparams import read_hparams
from gguf_tools.format.values import Metadata, Value

_THETA = 12_000_000.0
_ROPE = {
    "rope_type": "llama3", "rope_theta": _THETA, "factor": 8.0, "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0, "high_freq_factor": 4.0,
}  # fmt: skip
"""Base of the rotation and rope_parameters where config.json has none, as in transformers' class."""

_NUMBERS = ("alpha_n", "alpha_p", "beta", "eps")
_KEYS = keys.XIELU_ALPHA_N, keys.XIELU_ALPHA_P, keys.XIELU_BETA, keys.XIELU_EPS


def read_config(raw: Mapping[str, Any], path: str | Path) -> DecoderConfig:
    """Return the configuration of an Apertus, without the numbers of its activation."""
    if not raw.get("rope_scaling") and not raw.get("rope_parameters"):
        raw = merged(raw, {"rope_parameters": _ROPE})
    stated = with_defaults(raw, path)
    stated.fixed("hidden_act", "xielu", "llama.cpp's apertus has no other")
    for key, value in (("mlp_bias", False), ("post_norm", False), ("qk_norm", True)):
        stated.fixed(key, value, "llama.cpp's apertus has no other")
    read = ConfigReader(merged(stated.raw, {"hidden_act": "silu"}), path)
    fields = decoder_fields(read, theta=_THETA)
    if fields["rotated_cols"] != fields["head_dim"]:
        raise UnsupportedCheckpoint(
            f"{path}: {fields['rotated_cols']} columns of {fields['head_dim']} are rotated, expected all:"
            " llama.cpp's apertus has no other"
        )
    biased = read.flag("attention_bias", False)
    return DecoderConfig(**fields, attention_bias=biased, output_bias=biased, qk_norm=True)


def _with_numbers(config: DecoderConfig, weights: Renaming) -> DecoderConfig:
    """Return the configuration with the numbers that the checkpoint has of the activation."""
    return replace(config, xielu=tuple(
        tuple(
            float(weights.numbers(f"model.layers.{layer}.mlp.act_fn.{name}").astype(np.float32).reshape(()))
            for name in _NUMBERS
        )
        for layer in range(config.num_hidden_layers)
    ))  # fmt: skip


def _read_file(
    family: Architecture, metadata: Metadata, shapes: Mapping[str, tuple[int, ...]], path: str | Path
) -> DecoderConfig:
    """Return the configuration in a file, see `read_decoder`, with the numbers of the activation."""
    config, hparams = (
        read_decoder(family, metadata, shapes, path),
        read_hparams(metadata, family.gguf_name, path),
    )
    by_name = [hparams.by_layer(f"xielu_{name}", config.num_hidden_layers) for name in _NUMBERS]
    return replace(config, xielu=tuple(zip(*by_name, strict=True)))


_canonical_name = respelled(
    (".attention_layernorm.", ".input_layernorm."),
    (".feedforward_layernorm.", ".post_attention_layernorm."),
)
"""Names of norms -> those that most families have."""


def _numbers(place: int) -> Any:
    return lambda config, options: [numbers[place] for numbers in config.xielu] or None


_APERTUS = decoder(
    "ApertusForCausalLM",
    gguf_name="apertus",
    read_config=read_config,
    with_stored=_with_numbers,
    rules=(
        LLAMA3_ROTATION,
        *(rule for rule in dense_decoder(needs_output=True) if "ffn_gate" not in rule.outputs[0].name),
    ),
    metadata=(
        *(Key(name, Value.f32s, _numbers(place)) for place, name in enumerate(_KEYS)),
        *COMMON, VOCAB_SIZE, ROTATED_COLS,
    ),
    says=frozenset({LLAMA3}),
    drops=lambda config, options: (
        INV_FREQ, Drop(lambda name: ".act_fn." in name, "numbers of the activation: keys of the file"),
    ),
    canonical_name=_canonical_name,
    quirks=LLAMA,
    gated=False,
    reader=_read_file,
)  # fmt: skip

FAMILIES = (_APERTUS,)
