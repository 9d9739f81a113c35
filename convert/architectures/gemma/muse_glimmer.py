"""Muse Glimmer, the text part: normed embeddings, norms around attention and block, gates of attention.

Layers with a window rotate, the others don't. Queries and keys are normed without a weight; the file has
weights for these norms, which hold the factor of queries. Norms of layers are stored less one, the last norm
is not.

Facts of transformers' modeling_muse_glimmer.py, and llama.cpp's converter and src/models/muse-glimmer.cpp.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from convert.architectures.base import Architecture, Key
from convert.architectures.decoder.config import (
    DecoderConfig,
    decoder_fields,
    layers_of_kind,
    refuse_no_window,
    with_defaults,
)
from convert.architectures.decoder.family import WINDOWS, decoder
from convert.architectures.decoder.metadata import COMMON, SLIDING_PATTERN, SLIDING_WINDOW, read_decoder
from convert.architectures.decoder.rope import paired
from convert.architectures.decoder.rules import attention, dense_blocks, ends, in_layer, layers
from convert.architectures.gemma.gemma3 import vision_drops
from convert.architectures.rules import Arrange, Computed, Output, OutputTensor, Rule, plus_one
from convert.tokenizer.files import Quirks
from convert.weights.base import Weight
from gguf_tools.errors import FormatError, UnsupportedCheckpoint
from gguf_tools.format import keys
from gguf_tools.format.hparams import read_hparams
from gguf_tools.format.loaders import WINDOW_PERIODS
from gguf_tools.format.values import Metadata, Value
from gguf_tools.text import quoted

_PERIOD = WINDOW_PERIODS["muse-glimmer"]
_POST_EPS = 1e-8
"""Epsilon of norms behind attention and block, in llama.cpp's graph."""


@dataclass(frozen=True)
class MuseGlimmerConfig(DecoderConfig):
    """Configuration of a model.

    query_scale  what normed queries are multiplied by
    """

    query_scale: float = 1.0


def read_config(raw: Mapping[str, Any], path: str | Path) -> MuseGlimmerConfig:
    """Return the configuration of the text part of a Muse Glimmer."""
    read = with_defaults(raw, path)
    why = "llama.cpp's muse-glimmer has no other"
    for key, value in (
        ("attention_bias", False),
        ("hidden_activation", "silu"),
        ("post_norm_eps", _POST_EPS),
    ):
        read.fixed(key, value, why)
    fields = decoder_fields(read)
    kind, n_layers = fields["rope"].kind, fields["num_hidden_layers"]
    if kind != "default":
        raise UnsupportedCheckpoint(
            f"{path}: RoPE of type {quoted(kind)}, expected 'default': layers with a window alone rotate, and"
            " llama.cpp stretches no rotation of these"
        )
    if fields["tie_word_embeddings"]:
        raise UnsupportedCheckpoint(
            f"{path}: tie_word_embeddings is true, expected false: llama.cpp's muse-glimmer needs"
            " an output matrix"
        )
    sliding = layers_of_kind(read, n_layers, lambda layer: (n_layers - 1 - layer) % _PERIOD != 0)
    refuse_no_window(read, sliding)
    thetas = read.raw.get("layer_rope_theta")
    if thetas is None:
        thetas = [(n_layers - 1 - layer) % _PERIOD for layer in range(n_layers)]
    if not isinstance(thetas, list) or [bool(theta) for theta in thetas] != [
        layer in sliding for layer in range(n_layers)
    ]:
        raise read.bad("layer_rope_theta", "0 for layers without a window, a theta for each of the others")
    return MuseGlimmerConfig(
        **fields,
        **_computed(n_layers, sliding),
        sliding_window=read.size("sliding_window"),
        logit_scale=1 / read.number("output_multiplier"),
        final_logit_softcapping=read.number("final_logit_softcapping"),
        query_scale=read.number("qk_scale_factor"),
    )


def _computed(n_layers: int, sliding: tuple[int, ...]) -> dict[str, Any]:
    """Return the fields that no key says."""
    others = tuple(layer for layer in range(n_layers) if layer not in sliding)
    return {
        "sliding_layers": sliding,
        "unrotated_layers": others,
        "post_norm_eps": _POST_EPS,
        "norms_embeddings": True,
        "sigmoid_gates": True,
    }


def _read_file(
    family: Architecture, metadata: Metadata, shapes: Mapping[str, tuple[int, ...]], path: str | Path
) -> DecoderConfig:
    """Return the configuration in a file, see `read_decoder`, with what no key says."""
    config = read_decoder(family, metadata, shapes, path)
    factor = config.logit_scale
    if not factor:
        hparams = read_hparams(metadata, family.gguf_name, path)
        raise FormatError(f"{path}: {hparams.key('logit_scale')} is {factor}, expected more than 0")
    return replace(
        config,
        **_computed(config.num_hidden_layers, config.sliding_layers),
        logit_scale=1 / factor,
    )


def _filled(value: Callable[[MuseGlimmerConfig], float]) -> Arrange:
    """Return the arrangement that fills the weight of a norm with a `value`."""

    def made(name: str, weights: Sequence[Weight], config: MuseGlimmerConfig) -> OutputTensor:
        return Computed(name, np.full(config.head_dim, value(config), np.float32))

    return made


_Q_SOURCE, _Q_SIZES = "model.layers.{layer}.self_attn.q_proj.weight", "q_rows hidden_size"
_QUERIES = Rule(layers, (
    Output("blk.{layer}.attn_q_norm.weight", _Q_SOURCE, _Q_SIZES, _filled(lambda config: config.query_scale)),
    Output("blk.{layer}.attn_k_norm.weight", _Q_SOURCE, _Q_SIZES, _filled(lambda config: 1.0)),
    Output("blk.{layer}.attn_q.weight", _Q_SOURCE, _Q_SIZES, paired),
))  # fmt: skip
"""Queries, and the norms before them, where llama.cpp's converter writes these."""


def _norm(name: str, source: str) -> Rule:
    return in_layer(layers, f"{name}.weight", f"{source}.weight", "hidden_size", plus_one)


_MUSE_GLIMMER = decoder(
    "MuseGlimmerForConditionalGeneration",
    gguf_name="muse-glimmer",
    read_config=read_config,
    rules=(
        *ends(),
        *(_QUERIES if rule.outputs[0].name == _QUERIES.outputs[-1].name else rule
          for rule in attention(paired, plus_one)),
        in_layer(layers, "attn_gate.weight", "self_attn.gate_proj.weight", "q_rows hidden_size"),
        _norm("post_attention_norm", "post_attention_layernorm"),
        _norm("ffn_norm", "pre_feedforward_layernorm"),
        _norm("post_ffw_norm", "post_feedforward_layernorm"),
        *dense_blocks(),
    ),
    metadata=(
        *COMMON,
        Key(keys.FINAL_LOGIT_SOFTCAPPING, Value.f32, lambda c, o: c.final_logit_softcapping),
        Key(keys.LOGIT_SCALE, Value.f32, lambda c, o: 1 / c.logit_scale),
        SLIDING_WINDOW,
        SLIDING_PATTERN,
    ),
    drops=vision_drops,
    says=frozenset({WINDOWS}),
    quirks=Quirks(pre_tokenizers={"gpt-4o": "llama4"}, special_tokens={"eot": "<|eot|>"}, late_eot=True),
    windows="unstretched",
    reader=_read_file,
)  # fmt: skip

FAMILIES = (_MUSE_GLIMMER,)
