"""Ordinary families without experts, a block for each: what the parts in `decoder` leave open.

Mixtral stands here, too: to llama.cpp, it is a Llama.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from convert.architectures.base import Architecture, Key
from convert.architectures.config_reader import MAX_LAYERS, ConfigReader, merged
from convert.architectures.decoder.config import (
    DecoderConfig,
    decoder_fields,
    expert_fields,
    fix_head_dim,
    layers_of_kind,
    read_mrope_section,
    rotations_by_kind,
    window_fields,
    with_defaults,
)
from convert.architectures.decoder.family import LLAMA3, RAMP, WINDOWS, decoder, decoder_notes
from convert.architectures.decoder.metadata import (
    COMMON,
    MROPE_SECTIONS,
    ROTATED_COLS,
    SLIDING_PATTERN,
    SLIDING_THETA,
    SLIDING_WINDOW,
    VOCAB_SIZE,
    inserted,
    read_decoder,
    read_window,
    sliding_layers,
)
from convert.architectures.decoder.rope import LLAMA3_ROTATION, paired
from convert.architectures.decoder.rules import (
    attention,
    dense_decoder,
    ends,
    fused_blocks,
    in_layer,
    layers,
    moe_layers,
    norm_of_blocks,
    normed_behind,
    once,
    one,
    sparse_moe_experts,
    sparse_moe_name,
)
from convert.architectures.delta_net.arrange import ColumnsMoved, RowsMoved
from convert.architectures.gemma.gemma3 import vision_drops
from convert.architectures.rules import Arrange, OutputTensor, Rule, renamed
from convert.tokenizer.files import GLM as GLM_QUIRKS
from convert.tokenizer.files import LLAMA as LLAMA_QUIRKS
from convert.tokenizer.files import Quirks
from convert.weights.base import Weight
from gguf_tools.errors import UnsupportedCheckpoint
from gguf_tools.format import keys
from gguf_tools.format.hparams import read_hparams
from gguf_tools.format.loaders import WINDOW_PERIODS
from gguf_tools.format.values import Metadata, Value
from gguf_tools.text import quoted
from quantize.fill.sources import float_type

# ---- Llama, Mistral and Mixtral: rows of queries and keys change places, and Llama 3's RoPE becomes a tensor

LLAMA, MISTRAL, MIXTRAL = "LlamaForCausalLM", "MistralForCausalLM", "MixtralForCausalLM"


def _read_llama(raw: Mapping[str, Any], path: str | Path) -> DecoderConfig:
    """Return the configuration of a Llama, Mistral or Mixtral."""
    name = str(raw["architectures"][0])
    read = with_defaults(raw, path)
    fields = decoder_fields(read, theta=1e6 if name == MIXTRAL else 10000.0)
    fields["rotated_cols"] = fields["head_dim"]
    if name == MIXTRAL:
        fields |= expert_fields(read)
        fields["moe_intermediate_size"] = fields["intermediate_size"]
    if name == LLAMA:
        fields["stated_head_dim"] = fields["head_dim"]
        fields["attention_bias"] = fields["output_bias"] = read.flag("attention_bias", False)
        fields["mlp_bias"] = read.flag("mlp_bias", False)
    else:
        fields["sliding_window"] = read.size_or_null("sliding_window", None)
        fields["sliding_layers"] = tuple(range(fields["num_hidden_layers"]))
    return DecoderConfig(**fields)


_LLAMA = decoder(
    LLAMA, MISTRAL, MIXTRAL,
    gguf_name="llama",
    read_config=_read_llama,
    rules=(
        LLAMA3_ROTATION,
        *dense_decoder(paired, bias="mlp_bias"),
        in_layer(moe_layers, "ffn_gate_inp.weight", "block_sparse_moe.gate.weight",
                 "num_experts hidden_size"),
        *sparse_moe_experts(moe_layers),
    ),
    metadata=(*COMMON, VOCAB_SIZE, ROTATED_COLS),
    canonical_name=sparse_moe_name,
    says=frozenset({LLAMA3}),
    quirks=LLAMA_QUIRKS,
)  # fmt: skip


# ---- SmolLM 3: a Llama whose every fourth layer rotates nothing


def _unrotated(n_layers: int) -> tuple[int, ...]:
    """Return the layers that rotate nothing: every fourth, as llama.cpp computes."""
    return tuple(range(3, min(n_layers, MAX_LAYERS), 4))


def _read_smollm3(raw: Mapping[str, Any], path: str | Path) -> DecoderConfig:
    """Return the configuration of a SmolLM 3."""
    read = with_defaults(raw, path)
    for key in ("attention_bias", "mlp_bias"):
        read.fixed(key, False, "llama.cpp's smollm3 has no biases")
    read.fixed("use_sliding_window", False, "llama.cpp's smollm3 has no sliding window")
    read.overruled("sliding_window", "layer_types")
    read.fixed("no_rope_layer_interval", 4, "llama.cpp's smollm3 rotates all but every fourth layer")
    fields = decoder_fields(read, theta=2e6)
    fields["rotated_cols"] = fields["head_dim"]
    layers_without = _unrotated(fields["num_hidden_layers"])
    flags = raw.get("no_rope_layers")
    if flags is not None and flags != [int(n not in layers_without) for n in range(len(flags))]:
        raise UnsupportedCheckpoint(
            f"{path}: no_rope_layers leaves other layers unrotated than every fourth, which are llama.cpp's"
        )
    return DecoderConfig(**fields, unrotated_layers=layers_without)


def _read_smollm3_file(
    family: Architecture, metadata: Metadata, shapes: Mapping[str, tuple[int, ...]], path: str | Path
) -> DecoderConfig:
    """Return the configuration in a file, see `read_decoder`, with the layers that rotate nothing."""
    config = read_decoder(family, metadata, shapes, path)
    return replace(config, unrotated_layers=_unrotated(config.num_hidden_layers))


_SMOLLM3 = decoder(
    "SmolLM3ForCausalLM",
    gguf_name="smollm3",
    read_config=_read_smollm3,
    rules=dense_decoder(paired),
    metadata=(*COMMON, VOCAB_SIZE, ROTATED_COLS),
    quirks=LLAMA_QUIRKS,
    reader=_read_smollm3_file,
)


# ---- Ministral 3 and Mistral Small 3.1 and 3.2: a Llama beside a vision part, whose attention may grow
# sharper. In Ministral 3, scores are multiplied by a number that grows with the position, from the end of the
# context on that the model had before it was stretched.


def _read_ministral3(raw: Mapping[str, Any], path: str | Path) -> DecoderConfig:
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


def _read_ministral3_file(
    family: Architecture, metadata: Metadata, shapes: Mapping[str, tuple[int, ...]], path: str | Path
) -> DecoderConfig:
    """Return the configuration in a file, see `read_decoder`, with what positions do to the scores."""
    config = read_decoder(family, metadata, shapes, path)
    grows = read_hparams(metadata, family.gguf_name, path).temperature_scale
    length = config.rope.original_context
    return replace(config, sharpness=(grows, length) if grows and length else None)


_MINISTRAL3 = decoder(
    "Ministral3ForCausalLM",
    "Mistral3ForConditionalGeneration",
    gguf_name="mistral3",
    read_config=_read_ministral3,
    rules=(LLAMA3_ROTATION, *dense_decoder(paired)),
    metadata=(
        *COMMON, VOCAB_SIZE, ROTATED_COLS,
        Key(keys.ROPE_SCALING_YARN_LOG_MUL, Value.f32, lambda c, o: c.rope.log_multiplier),
        Key(keys.TEMPERATURE_SCALE, Value.f32, lambda c, o: c.sharpness and c.sharpness[0]),
    ),
    drops=vision_drops,
    says=frozenset({LLAMA3, RAMP}),
    quirks=LLAMA_QUIRKS,
    reader=_read_ministral3_file,
)  # fmt: skip


# ---- Qwen 2: queries, keys and values have biases, and no row changes its place


def _read_qwen2(raw: Mapping[str, Any], path: str | Path) -> DecoderConfig:
    """Return the configuration of a Qwen 2."""
    read = with_defaults(raw, path)
    fields = decoder_fields(read)
    fix_head_dim(read, fields, "qwen2")
    return DecoderConfig(**fields, **window_fields(read), attention_bias=True)


_QWEN2 = decoder("Qwen2ForCausalLM", gguf_name="qwen2", read_config=_read_qwen2, rules=dense_decoder())


# ---- Qwen 3: queries and keys are normed per head, before they are rotated


def _read_qwen3(raw: Mapping[str, Any], path: str | Path) -> DecoderConfig:
    """Return the configuration of a Qwen 3."""
    read = with_defaults(raw, path)
    biased = read.flag("attention_bias", False)
    return DecoderConfig(**decoder_fields(read), **window_fields(read), attention_bias=biased, qk_norm=True)


_QWEN3 = decoder(
    "Qwen3ForCausalLM", gguf_name="qwen3", read_config=_read_qwen3, rules=dense_decoder(), ranks=True
)


# ---- Seed-OSS: biases at queries, keys and values alone, and heads of a size of their own


def _read_seed_oss(raw: Mapping[str, Any], path: str | Path) -> DecoderConfig:
    """Return the configuration of a Seed-OSS."""
    read = with_defaults(raw, path)
    for key in ("attention_out_bias", "mlp_bias"):
        read.fixed(key, False, "llama.cpp's seed_oss has no such biases")
    return DecoderConfig(**decoder_fields(read), attention_bias=read.flag("attention_bias", True))


_SEED_OSS = decoder(
    "SeedOssForCausalLM",
    gguf_name="seed_oss",
    read_config=_read_seed_oss,
    rules=dense_decoder(norm="post_attention_norm"),
)


# ---- OLMo 2 and 3: norms behind attention and block and none before, queries and keys normed over all heads.
# OLMo 3 has windows in three of four layers, whose rotation is not stretched.

_OLMO3_THETA = 500000.0
"""Base of OLMo 3's rotation where config.json has none, as in transformers' class."""


def _read_olmo2(raw: Mapping[str, Any], path: str | Path) -> DecoderConfig:
    """Return the configuration of an OLMo 2 or 3."""
    windows: dict[str, Any] = {}
    if raw["architectures"][0] == "Olmo3ForCausalLM":
        windows["sliding_theta"], raw = rotations_by_kind(raw, path, _OLMO3_THETA, _OLMO3_THETA)
    read = with_defaults(raw, path)
    why = "llama.cpp's olmo2 has no other"
    for key, value in (("attention_bias", False), ("clip_qkv", None)):
        read.fixed(key, value, why)
    fields = decoder_fields(read)
    fix_head_dim(read, fields, "olmo2")
    if windows:
        sliding = layers_of_kind(read, fields["num_hidden_layers"], lambda layer: bool((layer + 1) % 4))
        window = read.size("sliding_window", 4096)
        windows |= {"sliding_layers": sliding, "sliding_window": window if sliding else None}
    return DecoderConfig(**fields, **windows, qk_norm=True, norms_all_heads=True)


def _olmo2_notes(config: DecoderConfig, options: Any) -> tuple[str, ...]:
    notes = decoder_notes(config, frozenset({WINDOWS}))
    theta = config.rope.theta
    if not config.sliding_layers or config.sliding_theta == theta:
        return notes
    return (
        *notes,
        f"layers with a window rotate with a rope_theta of {config.sliding_theta:g}; llama.cpp takes"
        f" {theta:g} for them too, that of the other layers, and rotates otherwise",
    )


_OLMO2 = decoder(
    "Olmo2ForCausalLM",
    "Olmo3ForCausalLM",
    gguf_name="olmo2",
    read_config=_read_olmo2,
    rules=normed_behind(needs_output=True),
    metadata=(
        *inserted(COMMON, SLIDING_THETA, after=keys.ROPE_FREQ_BASE), SLIDING_WINDOW, SLIDING_PATTERN,
    ),
    notes=_olmo2_notes,
    windows="plain",
)  # fmt: skip


# ---- GLM-4: neighbouring columns are rotated, norms around attention and block, gate and up in one matrix


def _read_glm4(raw: Mapping[str, Any], path: str | Path) -> DecoderConfig:
    """Return the configuration of a GLM-4."""
    read = with_defaults(raw, path)
    return DecoderConfig(**decoder_fields(read), attention_bias=read.flag("attention_bias", True))


def _glm4_rules(rotated: Arrange) -> tuple[Rule, ...]:
    return (
        *ends(),
        *attention(rotated),
        in_layer(layers, "post_attention_norm.weight", "post_self_attn_layernorm.weight", "hidden_size"),
        norm_of_blocks(),
        *fused_blocks(),
        in_layer(layers, "post_ffw_norm.weight", "post_mlp_layernorm.weight", "hidden_size"),
    )


_GLM4 = decoder(
    "Glm4ForCausalLM",
    gguf_name="glm4",
    read_config=_read_glm4,
    rules=_glm4_rules(renamed),
    metadata=(*COMMON, ROTATED_COLS),
    rotation="pairs",
    quirks=Quirks(
        pre_tokenizers=GLM_QUIRKS.pre_tokenizers,
        special_tokens={
            "eos": "<|endoftext|>", "eot": "<|user|>", "unk": "<|endoftext|>", "bos": "<|endoftext|>",
        },
    ),
)  # fmt: skip


# ---- GLM-4V, the text part: a GLM-4 whose files have rotated rows half of these apart, as M-RoPE needs them


def _read_glm4v(raw: Mapping[str, Any], path: str | Path) -> DecoderConfig:
    """Return the configuration of the text part of a GLM-4V."""
    read = with_defaults(raw, path)
    fields = decoder_fields(read)
    fix_head_dim(read, fields, "glm4v")
    section = read_mrope_section(read, fields["rotated_cols"] // 2, (8, 12, 12))
    return DecoderConfig(**fields, attention_bias=True, mrope_section=section)


def _halved(name: str, weights: Sequence[Weight], config: DecoderConfig) -> OutputTensor:
    """Return the one weight, a matrix or a vector, with neighbours that are rotated half of these apart."""
    (weight,) = weights
    rotated = np.arange(config.rotated_cols).reshape(-1, 2).T.reshape(-1)
    head = np.concatenate((rotated, np.arange(config.rotated_cols, config.head_dim)))
    order = (np.arange(0, weight.shape[0], config.head_dim)[:, None] + head).reshape(-1)
    if len(weight.shape) == 1:
        return ColumnsMoved(name, weight.shape, float_type(weight), weight, order)
    return RowsMoved(name, weight.shape, weight.type, weight, order)


_GLM4V = decoder(
    "Glm4vForConditionalGeneration",
    gguf_name="glm4",
    read_config=_read_glm4v,
    rules=_glm4_rules(_halved),
    metadata=(*inserted(COMMON, MROPE_SECTIONS, after=keys.HEAD_COUNT_KV), ROTATED_COLS),
    drops=vision_drops,
    rotation="pairs",  # the architecture's; M-RoPE rotates halves all the same
    quirks=_GLM4.quirks,
)


# ---- EXAONE 4: norms behind attention and block, and over the queries and keys of each head. Where some
# layers have a window, the others rotate nothing.

_HYBRID_LAYERS, _HYBRID_WINDOW = 64, 4096
"""Layers of the one model that llama.cpp computes with windows, and their window where no key says it."""


def _read_exaone4(raw: Mapping[str, Any], path: str | Path) -> DecoderConfig:
    """Return the configuration of an EXAONE 4."""
    read = with_defaults(raw, path)
    fields = decoder_fields(read)
    fix_head_dim(read, fields, "exaone4")
    n_layers, window = fields["num_hidden_layers"], read.size_or_null("sliding_window", None)
    if (window is None) == (n_layers == _HYBRID_LAYERS):
        raise UnsupportedCheckpoint(
            f"{path}: {n_layers} layers with a sliding_window of {window}: llama.cpp's exaone4 computes"
            f" windows in models of {_HYBRID_LAYERS} layers, and in these alone"
        )
    windows = {} if window is None else {"sliding_window": window, **hybrid_layers(read, n_layers)}
    return DecoderConfig(**fields, **windows, qk_norm=True)


def hybrid_layers(read: ConfigReader, n_layers: int) -> dict[str, Any]:
    """Return the fields about which layers have a window, by layer_types or by sliding_window_pattern."""
    pattern = read.raw.get("sliding_window_pattern")
    if not isinstance(pattern, str) or not pattern:
        pattern = "L" * (read.size("sliding_window_pattern", 4) - 1) + "G"
    sliding = layers_of_kind(read, n_layers, lambda layer: pattern[layer % len(pattern)] == "L")
    return unrotated_others(n_layers, sliding)


def unrotated_others(n_layers: int, sliding: tuple[int, ...]) -> dict[str, Any]:
    """Return the fields about layers with a window where the others rotate nothing."""
    others = tuple(layer for layer in range(n_layers) if layer not in sliding)
    return {"sliding_layers": sliding, "unrotated_layers": others}


def _read_exaone4_file(
    family: Architecture, metadata: Metadata, shapes: Mapping[str, tuple[int, ...]], path: str | Path
) -> DecoderConfig:
    """Return the configuration in a file, see `read_decoder`, with windows where llama.cpp has some."""
    config, hparams = (
        read_decoder(family, metadata, shapes, path),
        read_hparams(metadata, family.gguf_name, path),
    )
    n_layers = config.num_hidden_layers
    if n_layers != _HYBRID_LAYERS:
        return replace(config, sliding_window=None, sliding_layers=())
    window = read_window(hparams, _HYBRID_WINDOW)
    sliding = sliding_layers(hparams, n_layers, WINDOW_PERIODS[family.gguf_name])
    return replace(config, sliding_window=window, **unrotated_others(n_layers, sliding))


_EXAONE4 = decoder(
    "Exaone4ForCausalLM",
    gguf_name="exaone4",
    read_config=_read_exaone4,
    rules=(LLAMA3_ROTATION, *normed_behind()),
    metadata=(*COMMON, VOCAB_SIZE, SLIDING_WINDOW, SLIDING_PATTERN),
    says=frozenset({LLAMA3, WINDOWS}),
    reader=_read_exaone4_file,
    windows="alike",
    quirks=Quirks(pre_tokenizers={"gpt-2": "exaone4"}),
)

# ---- StarCoder 2: LayerNorms, blocks of two matrices without a gate, and biases everywhere


def _read_starcoder2(raw: Mapping[str, Any], path: str | Path) -> DecoderConfig:
    """Return the configuration of a StarCoder 2."""
    stated = with_defaults(raw, path)
    stated.fixed("hidden_act", "gelu_pytorch_tanh", "llama.cpp's starcoder2 has no other")
    stated.fixed("use_bias", True, "llama.cpp's starcoder2 always has biases")
    read = ConfigReader(merged(stated.raw, {"hidden_act": "silu"}), path)
    fields = decoder_fields(read, eps="norm_epsilon")
    fix_head_dim(read, fields, "starcoder2")
    window = read.size_or_null("sliding_window", None)
    return DecoderConfig(
        **fields,
        centred_norms=True,
        attention_bias=True,
        output_bias=True,
        mlp_bias=True,
        sliding_window=window,
        sliding_layers=tuple(range(min(fields["num_hidden_layers"], MAX_LAYERS))) if window else (),
    )


def _read_starcoder2_file(
    family: Architecture, metadata: Metadata, shapes: Mapping[str, tuple[int, ...]], path: str | Path
) -> DecoderConfig:
    """Return the configuration in a file, see `read_decoder`, whose norms are LayerNorms."""
    hparams = read_hparams(metadata, family.gguf_name, path)
    config = read_decoder(family, metadata, shapes, path)
    return replace(config, centred_norms=True, rms_norm_eps=hparams.number("layer_norm_epsilon", 1e-5))


def _starcoder2_rules() -> Iterator[Rule]:
    yield from ends()
    yield one(once, "output_norm.bias", "model.norm.bias", "hidden_size")
    yield from attention()
    yield norm_of_blocks()
    for name, norm in (("attn_norm", "input_layernorm"), ("ffn_norm", "post_attention_layernorm")):
        yield in_layer(layers, f"{name}.bias", f"{norm}.bias", "hidden_size")
    for name, source, rows, cols in (
        ("ffn_up", "mlp.c_fc", "intermediate_size", "hidden_size"),
        ("ffn_down", "mlp.c_proj", "hidden_size", "intermediate_size"),
    ):
        yield in_layer(layers, f"{name}.weight", f"{source}.weight", f"{rows} {cols}")
        yield in_layer(layers, f"{name}.bias", f"{source}.bias", rows)


_NORM_EPS = Key(keys.LAYERNORM_EPS, Value.f32, lambda c, o: c.rms_norm_eps)

_STARCODER2 = decoder(
    "Starcoder2ForCausalLM",
    gguf_name="starcoder2",
    read_config=_read_starcoder2,
    rules=tuple(_starcoder2_rules()),
    metadata=tuple(_NORM_EPS if key.name == keys.LAYERNORM_RMS_EPS else key for key in COMMON),
    reader=_read_starcoder2_file,
    gated=False,
    gelu="tanh",
)


FAMILIES = (
    _LLAMA, _SMOLLM3, _MINISTRAL3, _QWEN2, _QWEN3, _SEED_OSS, _OLMO2, _GLM4, _GLM4V, _EXAONE4, _STARCODER2,
)  # fmt: skip
