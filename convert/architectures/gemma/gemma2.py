"""Gemma 2: norms around attention and block, a window in every other layer, scores and logits with a bound.

Norms are stored less one. Files have no key of the rotation, whose theta is 10,000, and no output matrix.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from convert.architectures.base import Architecture, Key
from convert.architectures.config_reader import MAX_LAYERS, merged
from convert.architectures.decoder.config import DecoderConfig, decoder_fields, layers_of_kind, with_defaults
from convert.architectures.decoder.family import decoder
from convert.architectures.decoder.metadata import (
    CONTEXT,
    EMBEDDING,
    HEADS,
    SLIDING_WINDOW,
    WIDTH,
    read_decoder,
    read_window,
    sliding_layers,
)
from convert.architectures.decoder.rules import INV_FREQ, NO_OUTPUT, ends
from convert.architectures.gemma.gemma3 import QUIRKS, layer_rules, scores_divisor
from convert.architectures.rules import plus_one
from gguf_tools.errors import FormatError, UnsupportedCheckpoint
from gguf_tools.format import keys
from gguf_tools.format.hparams import read_hparams
from gguf_tools.format.loaders import WINDOW_PERIODS
from gguf_tools.format.values import Metadata, Value

_THETA = 10000.0
_CAPS, _WINDOW = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}, 4096
"""Bounds and window that llama.cpp takes where no key says them."""


def read_config(raw: Mapping[str, Any], path: str | Path) -> DecoderConfig:
    """Return the configuration of a Gemma 2."""
    # What the published files call hidden_act is overruled by hidden_activation.
    raw = merged(raw, {"hidden_act": None})
    read = with_defaults(raw, path, states_sizes=False)
    why = "llama.cpp's gemma2 has no other"
    for key, value in (
        ("attention_bias", False), ("use_bidirectional_attention", False), ("tie_word_embeddings", True),
        ("hidden_activation", "gelu_pytorch_tanh"),
    ):  # fmt: skip
        read.fixed(key, value, why)
    fields = decoder_fields(read, theta=_THETA)
    if fields["rope"].kind != "default" or fields["rope"].theta != _THETA:
        raise UnsupportedCheckpoint(
            f"{path}: RoPE that is scaled, or with another rope_theta than 10000: {why}"
        )
    n_layers = fields["num_hidden_layers"]
    every_other = tuple(range(0, min(n_layers, MAX_LAYERS), 2))
    if layers_of_kind(read, n_layers, lambda layer: layer in every_other) != every_other:
        raise UnsupportedCheckpoint(
            f"{path}: layer_types is not one of sliding_attention to one of full: {why}"
        )
    config = DecoderConfig(
        **fields,
        sliding_window=read.size("sliding_window"),
        sliding_layers=every_other,
        attention_softcapping=read.number("attn_logit_softcapping"),
        final_logit_softcapping=read.number("final_logit_softcapping"),
    )
    divisor = scores_divisor(config, _LAYERS_OF_27B)
    read.fixed("query_pre_attn_scalar", divisor, "llama.cpp's gemma2 divides scores by the root of head_dim")
    return replace(config, attention_scale=divisor**-0.5)


_LAYERS_OF_27B = 46


def _read_file(
    family: Architecture, metadata: Metadata, shapes: Mapping[str, tuple[int, ...]], path: str | Path
) -> DecoderConfig:
    """Return the configuration in a file, see `read_decoder`, with what no key says."""
    config = read_decoder(family, metadata, shapes, path)
    hparams = read_hparams(metadata, family.gguf_name, path)
    caps = {name: hparams.number(name, cap) for name, cap in _CAPS.items()}
    for name, cap in caps.items():
        if not cap:
            raise FormatError(f"{path}: {hparams.key(name)} is 0, expected more: llama.cpp divides by it")
    return replace(
        config,
        attention_scale=scores_divisor(config, _LAYERS_OF_27B) ** -0.5,
        attention_softcapping=caps["attn_logit_softcapping"],
        final_logit_softcapping=caps["final_logit_softcapping"],
        embedding_scale=config.hidden_size**0.5,
        sliding_window=read_window(hparams, _WINDOW),
        sliding_layers=sliding_layers(hparams, config.num_hidden_layers, WINDOW_PERIODS[family.gguf_name]),
        sliding_theta=hparams.number("rope_freq_base_swa", config.rope.theta),
    )


_GEMMA2 = decoder(
    "Gemma2ForCausalLM",
    gguf_name="gemma2",
    read_config=read_config,
    rules=(*ends(plus_one, has_output=False), *layer_rules()),
    metadata=(
        CONTEXT, EMBEDDING, Key(keys.BLOCK_COUNT, Value.u32, lambda c, o: c.num_hidden_layers), WIDTH, HEADS,
        Key(keys.HEAD_COUNT_KV, Value.u32, lambda c, o: c.num_key_value_heads),
        Key(keys.LAYERNORM_RMS_EPS, Value.f32, lambda c, o: c.rms_norm_eps),
        Key(keys.KEY_LENGTH, Value.u32, lambda c, o: c.head_dim),
        Key(keys.VALUE_LENGTH, Value.u32, lambda c, o: c.head_dim),
        Key(keys.ATTN_LOGIT_SOFTCAPPING, Value.f32, lambda c, o: c.attention_softcapping),
        Key(keys.FINAL_LOGIT_SOFTCAPPING, Value.f32, lambda c, o: c.final_logit_softcapping),
        SLIDING_WINDOW,
    ),
    drops=lambda config, options: (INV_FREQ, NO_OUTPUT),
    notes=lambda config, options: (),
    quirks=QUIRKS,
    reader=_read_file,
    windows="stretched",
    gelu="tanh",
)  # fmt: skip

FAMILIES = (_GEMMA2,)
