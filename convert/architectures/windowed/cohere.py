"""Cohere 2 (Command R7B, Command A) and Cohere 2 with experts (Command A+): attention and block side by side.

Both see the same hidden states through one norm, a LayerNorm without biases, and are added together. Layers
with a window rotate neighbours, the others nothing. In a model with experts, leading dense layers rotate,
too, and the norm may be an RMSNorm.

Facts of transformers' modeling_cohere2_moe.py and llama.cpp's converter (Cohere2Model, Cohere2MoeModel).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from convert.architectures.base import Architecture, Key
from convert.architectures.config_reader import MAX_LAYERS, ConfigReader
from convert.architectures.decoder.config import (
    DecoderConfig,
    decoder_fields,
    expert_fields,
    fix_head_dim,
    layers_of_kind,
    refuse_no_window,
    with_defaults,
)
from convert.architectures.decoder.family import WINDOWS, decoder
from convert.architectures.decoder.metadata import (
    COMMON,
    DENSE_LAYERS,
    EXPERT_NORM,
    EXPERT_WIDTH,
    ROTATED_COLS,
    SHARED_EXPERTS,
    SLIDING_PATTERN,
    SLIDING_WINDOW,
    VOCAB_SIZE,
    inserted,
    read_decoder,
)
from convert.architectures.decoder.rules import (
    INV_FREQ,
    NO_OUTPUT,
    attention,
    dense_blocks,
    drop_mtp,
    ends,
    expert_stacks,
    in_layer,
    layers_if,
    moe_layers,
    shared_experts,
)
from convert.architectures.rules import Drop
from gguf_tools.errors import FormatError, UnsupportedCheckpoint
from gguf_tools.format import keys
from gguf_tools.format.hparams import read_hparams
from gguf_tools.format.loaders import WINDOW_PERIODS
from gguf_tools.format.values import Metadata, Value
from gguf_tools.text import quoted

_PERIOD = WINDOW_PERIODS["cohere2"]
_AS_PUBLISHED: Mapping[str, Any] = {
    "use_qk_norm": False, "use_parallel_block": True, "use_parallel_embedding": False,
    "use_gated_activation": True, "position_embedding_type": "rope_gptj", "rotary_pct": 1.0,
    "order_of_interleaved_layers": "local_attn_first",
}  # fmt: skip
"""Fields of published models that transformers' class does not know, and what it computes."""


def _fields(read: ConfigReader) -> dict[str, Any]:
    """Return the fields of both families."""
    for key, value in _AS_PUBLISHED.items():
        read.fixed(key, value, "transformers and llama.cpp compute with no other")
    read.overruled("attention_bias", "layer_switch")  # biases are looked for in the checkpoint
    fields = decoder_fields(read, eps="layer_norm_eps")
    if fields["rope"].kind not in ("default", "none"):
        raise UnsupportedCheckpoint(
            f"{read.path}: RoPE of type {quoted(fields['rope'].kind)}, expected 'default': llama.cpp's"
            " converter writes no other for Cohere"
        )
    logit_scale = read.number("logit_scale", 0.0625)
    return {
        **fields,
        "rotated_cols": fields["head_dim"],
        "logit_scale": 1 / logit_scale,
        "sliding_window": read.size("sliding_window", 4096),
        "is_parallel": True,
    }


def _with_layers(config: DecoderConfig, sliding: tuple[int, ...], rotated: tuple[int, ...]) -> DecoderConfig:
    others = set(range(config.num_hidden_layers)) - {*rotated}
    return replace(config, sliding_layers=sliding, unrotated_layers=tuple(sorted(others)))


def _sliding(read: ConfigReader, n_layers: int, period: int, first: int = 0) -> tuple[int, ...]:
    """Return the layers with a window; without layer_types, all but every `period`-th from `first` on."""
    return layers_of_kind(read, n_layers, lambda layer: (layer - first + 1) % period != 0)


def _read_cohere2(raw: Mapping[str, Any], path: str | Path) -> DecoderConfig:
    """Return the configuration of a Cohere 2."""
    read = with_defaults(raw, path)
    read.fixed("tie_word_embeddings", True, "llama.cpp's cohere2 has no output matrix")
    fields = _fields(read)
    fix_head_dim(read, fields, "cohere2")
    period = read.size("sliding_window_pattern", read.size("_sliding_window_pattern", _PERIOD))
    sliding = _sliding(read, fields["num_hidden_layers"], period)
    refuse_no_window(read, sliding)
    return _with_layers(DecoderConfig(**fields, centred_norms=True), sliding, sliding)


def _read_cohere2moe(raw: Mapping[str, Any], path: str | Path) -> DecoderConfig:
    """Return the configuration of a Cohere 2 with experts."""
    read = with_defaults(raw, path)
    eps = read.number_or_null("rms_norm_eps")
    fields = _fields(read)
    fields |= expert_fields(read)
    n_layers, width = fields["num_hidden_layers"], fields["intermediate_size"]
    n_shared = read.size("num_shared_experts", 0, least=0)
    if n_shared:
        read.fixed("shared_expert_combination_strategy", "average", "llama.cpp's cohere2moe has no other")
    else:
        read.overruled("shared_expert_combination_strategy")
    scoring = read.choice("expert_selection_fn", ("softmax", "sigmoid"))
    n_dense = _dense_layers(read, n_layers)
    is_first_rotated = read.size("prefix_dense_sliding_window_pattern", 1)
    sliding = _sliding_of_mixture(read, n_layers, is_first_rotated)
    refuse_no_window(read, sliding)
    if is_first_rotated != 1 and not {*range(n_dense)} <= {*sliding}:
        raise read.bad(
            "prefix_dense_sliding_window_pattern", "1: llama.cpp rotates every leading dense layer"
        )
    read.overruled("num_nextn_predict_layers")  # their weights are left out with a note
    normed = read.flag("norm_topk_prob", True)
    config = DecoderConfig(
        **fields | {
            "rms_norm_eps": eps or fields["rms_norm_eps"],
            "intermediate_size": read.size("prefix_dense_intermediate_size", width),
        },
        centred_norms=eps is None,
        moe_intermediate_size=width,
        num_shared_experts=n_shared or None,
        shared_expert_intermediate_size=n_shared * width,
        block_scale=0.5 if n_shared else None,
        first_k_dense_replace=n_dense,
        scoring_func=scoring,
        # Of softmax, transformers takes the chosen experts alone, which is the same.
        norm_topk_prob=normed or scoring == "softmax",
    )  # fmt: skip
    return _with_layers(config, sliding, (*sliding, *range(n_dense)))


def _dense_layers(read: ConfigReader, n_layers: int) -> int:
    kinds = read.raw.get("mlp_layer_types")
    if kinds is None:
        return read.size("first_k_dense_replace", 0, least=0, most=n_layers)
    count = kinds.count("dense") if isinstance(kinds, list) else 0
    if kinds != ["dense"] * count + ["sparse"] * (n_layers - count):
        raise read.bad("mlp_layer_types", f"'dense' for leading layers, then 'sparse', {n_layers} in all")
    return count


def _sliding_of_mixture(read: ConfigReader, n_layers: int, prefix: int) -> tuple[int, ...]:
    """Return the layers with a window; those of first_k_dense_replace have the period `prefix`."""
    period, n_dense = (
        read.size("sliding_window_pattern", _PERIOD),
        read.size("first_k_dense_replace", 0, least=0, most=n_layers),
    )
    if read.raw.get("layer_types") is not None:
        return _sliding(read, n_layers, period)
    leading = [layer for layer in range(n_dense) if (layer + 1) % prefix]
    return *leading, *(layer for layer in _sliding(read, n_layers, period, n_dense) if layer >= n_dense)


def _read_file(
    family: Architecture, metadata: Metadata, shapes: Mapping[str, tuple[int, ...]], path: str | Path
) -> DecoderConfig:
    """Read the configuration out of the keys and tensors of a GGUF file; see `read_decoder`."""
    plain = read_decoder(family, metadata, shapes, path)
    hparams = read_hparams(metadata, family.gguf_name, path)
    if not plain.sliding_layers:
        raise FormatError(f"{path}: {hparams.key('sliding_window_pattern')} names no layer with a window")
    is_mixture = family.gguf_name == "cohere2moe"
    rms = hparams.layer_norm_rms_epsilon if is_mixture else None
    factor = hparams.logit_scale
    # Layers with a window are stretched as the model is, which "none" says is not.
    rope = replace(plain.rope, factor=1.0) if plain.rope.kind == "none" else plain.rope
    config = replace(
        plain,
        rope=rope,
        rms_norm_eps=rms or hparams.number("layer_norm_epsilon", 1e-5),
        centred_norms=not rms,
        logit_scale=1 / factor if factor else None,
        is_parallel=True,
        sliding_theta=None,  # llama.cpp's graphs take the model's
        block_scale=0.5 if is_mixture and plain.num_shared_experts else None,
    )
    rotated = (*config.sliding_layers, *range(config.first_k_dense_replace if is_mixture else 0))
    return _with_layers(config, config.sliding_layers, rotated)


def _by_period(c: DecoderConfig) -> bool:
    """Return whether the layers with a window are those that llama.cpp takes for such without a key."""
    layers = range(min(c.num_hidden_layers, MAX_LAYERS))
    return c.sliding_layers == tuple(layer for layer in layers if (layer + 1) % _PERIOD)


_RMS_EPS = Key(keys.LAYERNORM_RMS_EPS, Value.f32, lambda c, o: None if c.centred_norms else c.rms_norm_eps)
_EPS = Key(keys.LAYERNORM_EPS, Value.f32, lambda c, o: c.rms_norm_eps if c.centred_norms else None)
_KEYS: tuple[Key, ...] = tuple(
    _RMS_EPS if key.name == keys.LAYERNORM_RMS_EPS else key
    for key in inserted(COMMON, _EPS, after=keys.LAYERNORM_RMS_EPS)
)
_LOGIT_SCALE = Key(keys.LOGIT_SCALE, Value.f32, lambda c, o: 1 / c.logit_scale)
_UNSCALED = Key(keys.ROPE_SCALING_TYPE, Value.string, lambda c, o: "none")
_PATTERN = replace(SLIDING_PATTERN, value=lambda c, o: None if _by_period(c) else SLIDING_PATTERN.value(c, o))


_COHERE2 = decoder(
    "Cohere2ForCausalLM",
    gguf_name="cohere2",
    read_config=_read_cohere2,
    rules=(*ends(has_output=False), *attention(), *dense_blocks()),
    metadata=(*_KEYS, _LOGIT_SCALE, SLIDING_WINDOW, _PATTERN, VOCAB_SIZE, ROTATED_COLS, _UNSCALED),
    drops=lambda config, options: (INV_FREQ, NO_OUTPUT),
    says=frozenset({WINDOWS}),
    rotation="pairs",
    windows="stretched",
    reader=_read_file,
)


def _drops(config: DecoderConfig, options: Any) -> tuple[Drop, ...]:
    return INV_FREQ, drop_mtp(config, "by no option for this family")


_COHERE2MOE = decoder(
    "Cohere2MoeForCausalLM",
    gguf_name="cohere2moe",
    read_config=_read_cohere2moe,
    rules=(
        *ends(),
        *attention(),
        *dense_blocks(),
        in_layer(moe_layers, "ffn_gate_inp.weight", "mlp.gate.weight", "num_experts hidden_size"),
        *expert_stacks(moe_layers),
        *shared_experts(layers_if("num_shared_experts", moe_layers)),
    ),
    metadata=(
        *_KEYS, _LOGIT_SCALE, SLIDING_WINDOW, SLIDING_PATTERN, VOCAB_SIZE, EXPERT_WIDTH, DENSE_LAYERS,
        EXPERT_NORM, SHARED_EXPERTS,
        Key(keys.EXPERT_SHARED_FEED_FORWARD_LENGTH, Value.u32,
            lambda c, o: c.shared_expert_intermediate_size or None),
        ROTATED_COLS, _UNSCALED,
    ),
    drops=_drops,
    says=frozenset({WINDOWS}),
    rotation="pairs",
    windows="stretched",
    unset_gating="sigmoid",
    says_norm=True,
    reader=_read_file,
)  # fmt: skip

FAMILIES = (_COHERE2, _COHERE2MOE)
