"""Gemma 3: norms around attention and block, five layers with a window to one without, scaled embeddings.

Norms are stored less one. Layers with a window rotate by a theta of their own, and are not stretched.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from convert.architectures.base import Architecture
from convert.architectures.config_reader import MAX_LAYERS, ConfigReader
from convert.architectures.decoder.config import (
    DecoderConfig,
    decoder_fields,
    refuse_factor,
    rotations_by_kind,
    with_defaults,
)
from convert.architectures.decoder.family import WINDOWS, decoder
from convert.architectures.decoder.metadata import (
    COMMON,
    SLIDING_THETA,
    SLIDING_WINDOW,
    inserted,
    read_decoder,
)
from convert.architectures.decoder.rules import INV_FREQ, attention, dense_blocks, ends, in_layer, layers
from convert.architectures.options import EmbeddingOptions, NoOptions
from convert.architectures.rules import Drop, Rule, plus_one
from convert.tokenizer.files import Quirks
from gguf_tools.errors import UnsupportedCheckpoint
from gguf_tools.format import keys
from gguf_tools.format.values import Metadata


def read_config(raw: Mapping[str, Any], path: str | Path, *, is_encoder: bool = False) -> DecoderConfig:
    """Return the configuration of a Gemma 3, or of an EmbeddingGemma, whose tokens see later ones, too."""
    local = ConfigReader(raw, path).number("rope_local_base_freq", 10000.0)
    theta, raw = rotations_by_kind(raw, path, 1e6, local)
    read = with_defaults(raw, path, states_sizes=False)
    why = "llama.cpp's gemma3 has none"
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        read.fixed(key, None, why)
    for key, value in (("attention_bias", False), ("use_bidirectional_attention", is_encoder)):
        read.fixed(key, value, why)
    read.fixed("hidden_activation", "gelu_pytorch_tanh", "llama.cpp has no other for this architecture")
    fields = decoder_fields(read)
    refuse_factor(fields["rope"], path, "gemma3")
    windows = tuple(layer for layer in range(min(fields["num_hidden_layers"], MAX_LAYERS)) if (layer + 1) % 6)
    kinds = raw.get("layer_types")
    if kinds is not None and kinds != [
        "sliding_attention" if n in windows else "full_attention" for n in range(fields["num_hidden_layers"])
    ]:
        raise UnsupportedCheckpoint(f"{path}: layer_types is not five of sliding_attention to one of full")
    for key in ("sliding_window_pattern", "_sliding_window_pattern"):
        read.fixed(key, 6, "llama.cpp's gemma3 has a window in all but every sixth layer")
    config = DecoderConfig(
        **fields,
        qk_norm=True,
        sliding_window=read.size("sliding_window"),
        sliding_layers=windows,
        sliding_theta=theta,
    )
    scale = scores_divisor(config, _LAYERS_OF_27B)
    read.fixed("query_pre_attn_scalar", scale, "llama.cpp's gemma3 divides scores by the root of head_dim")
    return replace(config, attention_scale=scale**-0.5)


_LAYERS_OF_27B = 62


def scores_divisor(config: DecoderConfig, layers_of_27b: int) -> int:
    """Return the divisor of a Gemma's scores, before the root. llama.cpp knows the 27B by its layers."""
    if config.num_hidden_layers == layers_of_27b:
        return config.hidden_size // config.num_attention_heads
    return config.head_dim


def _read_file(
    family: Architecture, metadata: Metadata, shapes: Mapping[str, tuple[int, ...]], path: str | Path
) -> DecoderConfig:
    """Return the configuration in a file, see `read_decoder`, with what no key says."""
    config = read_decoder(family, metadata, shapes, path)
    divisor = config.head_dim if family.encodes else scores_divisor(config, _LAYERS_OF_27B)
    scale = divisor**-0.5
    return replace(config, attention_scale=scale, embedding_scale=config.hidden_size**0.5)


def vision_drops(config: DecoderConfig, options: NoOptions) -> tuple[Drop, ...]:
    """Return the weights that a file of the text part leaves out."""
    drop = Drop(
        lambda name: name.removeprefix("model.").startswith(_OTHER_PARTS),
        "part for images or sound; the file holds the text part",
    )
    return INV_FREQ, drop


_OTHER_PARTS = (
    "vision_tower.", "vision_model.", "multi_modal_projector.", "vision_embedder.", "embed_vision.",
    "audio_tower.", "embed_audio.", "visual.", "patch_merge_mlp.", "vision_adapter.", "vision_projection.",
    "vit_large_projector.",
)  # fmt: skip
"""Beginnings of names of weights that read images and sound."""


def _norm(name: str, source: str) -> Rule:
    return in_layer(layers, f"{name}.weight", f"{source}.weight", "hidden_size", plus_one)


def layer_rules() -> tuple[Rule, ...]:
    """Return the rules of the layers: norms around attention and dense blocks, stored less one."""
    return (
        *attention(norm=plus_one),
        _norm("post_attention_norm", "post_attention_layernorm"),
        _norm("ffn_norm", "pre_feedforward_layernorm"),
        _norm("post_ffw_norm", "post_feedforward_layernorm"),
        *dense_blocks(),
    )


QUIRKS = Quirks(sentencepiece=True, space_prefix=False)


_GEMMA3 = decoder(
    "Gemma3ForCausalLM",
    "Gemma3ForConditionalGeneration",
    gguf_name="gemma3",
    read_config=read_config,
    rules=(*ends(plus_one), *layer_rules()),
    metadata=(*inserted(COMMON, SLIDING_THETA, after=keys.ROPE_FREQ_BASE), SLIDING_WINDOW),
    drops=vision_drops,
    says=frozenset({WINDOWS}),
    quirks=QUIRKS,
    reader=_read_file,
    windows="unstretched",
    window_theta=10000.0,
    gelu="tanh",
)

# ---- EmbeddingGemma: an encoder, which makes vectors of texts

_EMBEDDING_GEMMA = replace(
    _GEMMA3,
    hf_names=("Gemma3TextModel",),
    gguf_name="gemma-embedding",
    read_config=partial(read_config, is_encoder=True),
    options=EmbeddingOptions,
    encodes=True,
)


def choose(config: Mapping[str, Any]) -> Architecture:
    """Return the family of a Gemma 3: its base class is an EmbeddingGemma's, too."""
    is_encoder = config["architectures"][0] in _EMBEDDING_GEMMA.hf_names and config.get(
        "use_bidirectional_attention"
    )
    return _EMBEDDING_GEMMA if is_encoder else _GEMMA3


FAMILIES = (_GEMMA3, _EMBEDDING_GEMMA)
