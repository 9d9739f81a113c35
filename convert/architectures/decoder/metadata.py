"""The keys that all decoders have, in the order of llama.cpp's converter: COMMON writes them.

What a configuration lacks is left out: a dense model has no keys about experts. `read_decoder` is the inverse
of COMMON. It takes the keys that llama.cpp reads for the architecture (`gguf_tools.format.loaders`), as that
takes them. What keys and tensors leave open is what llama.cpp computes: fields of the family's `Architecture`
say it, and a family with more of that has a reader of its own.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from convert.architectures.base import Architecture, Key
from convert.architectures.config_reader import MAX_LAYERS
from convert.architectures.decoder.config import DecoderConfig
from convert.architectures.decoder.rope import RopeConfig
from convert.architectures.decoder.rules import layers
from gguf_tools.errors import FormatError, MissingTensor, UnsupportedCheckpoint
from gguf_tools.format import keys
from gguf_tools.format.hparams import HParams, read_hparams
from gguf_tools.format.loaders import FULL_FIRST, LOADERS, WINDOW_PERIODS
from gguf_tools.format.values import Metadata, Value
from gguf_tools.text import quoted

_u32, _f32, _bool, _string = Value.u32, Value.f32, Value.bool_, Value.string

GATING_FUNCTIONS: Mapping[str, int] = {"softmax": 1, "sigmoid": 2}
"""Number in expert_gating_func for each scoring function that most families have."""

_SCALING_KEYS = ("linear", "yarn", "longrope")
"""Kinds of RoPE that have keys; of the last, its name alone."""


def _yarn(name: str) -> Any:
    return lambda c, o: getattr(c.rope, name) if c.rope.kind == "yarn" else None


ATTENTION_FACTOR = Key(
    keys.ROPE_SCALING_ATTN_FACTOR, _f32, lambda c, o: c.rope.yarn and c.rope.yarn.remaining_factor
)
"""Factor of the rotated columns of a YaRN; llama.cpp's converter leaves it out."""


EXPERTS = Key(keys.EXPERT_COUNT, _u32, lambda c, o: c.num_experts or None)
USED_EXPERTS = Key(keys.EXPERT_USED_COUNT, _u32, lambda c, o: c.num_experts_per_tok or None)
GATING = Key(keys.EXPERT_GATING_FUNC, _u32, lambda c, o: c.scoring_func and GATING_FUNCTIONS[c.scoring_func])

CONTEXT = Key(keys.CONTEXT_LENGTH, _u32, lambda c, o: c.max_position_embeddings)
EMBEDDING = Key(keys.EMBEDDING_LENGTH, _u32, lambda c, o: c.hidden_size)
WIDTH = Key(keys.FEED_FORWARD_LENGTH, _u32, lambda c, o: c.intermediate_size or None)
HEADS = Key(keys.HEAD_COUNT, _u32, lambda c, o: c.num_attention_heads)
SIZES: tuple[Key, ...] = (CONTEXT, EMBEDDING, WIDTH, HEADS)
"""Sizes that have the same names in every family's configuration."""

ROTATION: tuple[Key, ...] = (
    Key(keys.ROPE_SCALING_TYPE, _string, lambda c, o: c.rope.kind if c.rope.kind in _SCALING_KEYS else None),
    Key(keys.ROPE_SCALING_FACTOR, _f32,
        lambda c, o: c.rope.factor if c.rope.kind in ("linear", "yarn") else None),
    Key(keys.ROPE_SCALING_ORIG_CTX_LEN, _u32, _yarn("original_context")),
    Key(keys.ROPE_SCALING_YARN_EXT_FACTOR, _f32, _yarn("extrapolation_factor")),
    Key(keys.ROPE_SCALING_YARN_ATTN_FACTOR, _f32, _yarn("written_factor")),
    ATTENTION_FACTOR,
    Key(keys.ROPE_SCALING_YARN_BETA_FAST, _f32, _yarn("beta_fast")),
    Key(keys.ROPE_SCALING_YARN_BETA_SLOW, _f32, _yarn("beta_slow")),
    Key(keys.ROPE_FREQ_BASE, _f32, lambda c, o: c.rope.theta),
    Key(keys.LAYERNORM_RMS_EPS, _f32, lambda c, o: c.rms_norm_eps),
)  # fmt: skip
"""How columns are rotated, and the epsilon of norms."""

COMMON: tuple[Key, ...] = (
    Key(keys.BLOCK_COUNT, _u32, lambda c, o: len(layers(c, o))),
    *SIZES,
    Key(keys.HEAD_COUNT_KV, _u32, lambda c, o: c.num_key_value_heads),
    *ROTATION,
    EXPERTS,
    USED_EXPERTS,
    Key(keys.EXPERT_GROUP_COUNT, _u32, lambda c, o: c.n_group),
    Key(keys.EXPERT_GROUP_USED_COUNT, _u32, lambda c, o: c.topk_group),
    GATING,
    Key(keys.KEY_LENGTH, _u32, lambda c, o: c.stated_head_dim),
    Key(keys.VALUE_LENGTH, _u32, lambda c, o: c.stated_head_dim and c.value_cols),
)  # fmt: skip

EXPERT_WIDTH = Key(keys.EXPERT_FEED_FORWARD_LENGTH, _u32, lambda c, o: c.moe_intermediate_size or None)
SHARED_WIDTH = Key(
    keys.EXPERT_SHARED_FEED_FORWARD_LENGTH, _u32, lambda c, o: c.shared_intermediate_size or None
)
ROTATED_COLS = Key(keys.ROPE_DIMENSION_COUNT, _u32, lambda c, o: c.rotated_cols)
DENSE_LAYERS = Key(keys.LEADING_DENSE_BLOCK_COUNT, _u32, lambda c, o: c.first_k_dense_replace)
SHARED_EXPERTS = Key(keys.EXPERT_SHARED_COUNT, _u32, lambda c, o: c.num_shared_experts)
EXPERT_SCALE = Key(keys.EXPERT_WEIGHTS_SCALE, _f32, lambda c, o: c.routed_scaling_factor)
EXPERT_NORM = Key(keys.EXPERT_WEIGHTS_NORM, _bool, lambda c, o: c.norm_topk_prob)
SLIDING_PATTERN = Key(
    keys.SLIDING_WINDOW_PATTERN,
    Value.bools,
    lambda c, o: None if c.sliding_window is None else [layer in c.sliding_layers for layer in layers(c, o)],
)
SLIDING_WINDOW = Key(keys.SLIDING_WINDOW, _u32, lambda c, o: c.sliding_window)
MROPE_SECTIONS = Key(
    keys.ROPE_DIMENSION_SECTIONS,
    Value.i32s,
    lambda c, o: c.mrope_section and (*c.mrope_section, 0, 0, 0, 0)[:4],
)
"""Sections of M-RoPE, padded to four."""
VOCAB_SIZE = Key(keys.VOCAB_SIZE, _u32, lambda c, o: c.vocab_size)


SLIDING_THETA = Key(keys.ROPE_FREQ_BASE_SWA, _f32, lambda c, o: c.sliding_theta)
"""Base of the rotation of layers with a window; stands behind that of the others."""


def _limits(key: str, name: str) -> Key:
    """Return the key of the limits of all layers, also of those for which config.json says nothing."""

    def padded(config: Any, options: Any) -> tuple[float, ...] | None:
        limits, n_layers = getattr(config, name), len(layers(config, options))
        return None if limits is None else (*limits, *(0.0,) * n_layers)[:n_layers]

    return Key(key, Value.f32s, padded)


LIMITS: tuple[Key, ...] = (
    _limits(keys.SWIGLU_CLAMP_EXP, "expert_limits"),
    _limits(keys.SWIGLU_CLAMP_SHEXP, "block_limits"),
)
"""Limits of SiLU(gate), and of up from both sides: in routed experts, and in blocks and shared experts."""


def counts_by_layer(key: str, count: str) -> Key:
    """Return a key with a count for each layer, an attribute of the configuration; see `windowed`."""
    return Key(key, Value.i32s, lambda c, o: [
        getattr(c.windowed if layer in c.sliding_layers else c, count) for layer in layers(c, o)
    ])  # fmt: skip


def changed(metadata: Sequence[Key], *others: Key) -> tuple[Key, ...]:
    """Return the keys with others in the places of those that have their names."""
    by_name = {key.name: key for key in others}
    return tuple(by_name.get(key.name, key) for key in metadata)


def inserted(metadata: Sequence[Key], key: Key, *, after: str) -> tuple[Key, ...]:
    """Return the keys with another one behind that for `after`, a template of gguf_tools.format.keys."""
    at = next(number for number, key in enumerate(metadata) if key.name == after) + 1
    return *metadata[:at], key, *metadata[at:]


def read_decoder(
    family: Architecture,
    metadata: Metadata,
    shapes: Mapping[str, tuple[int, ...]],
    path: str | Path,
    *,
    by_layer: Container[str] = (),
    own_values: bool = False,
) -> DecoderConfig:
    """Read the configuration out of the keys and tensors of a GGUF file, as llama.cpp's loader does.

    family    whose `gguf_name` general.architecture says
    shapes    tensor name -> shape, rows first
    path      the file, for messages
    by_layer  fields of HParams that may differ from layer to layer; of these, the first that isn't 0
    own_values  whether values may have other columns than keys
    raises    FormatError, MissingTensor, UnsupportedCheckpoint, naming the file and the key
    """
    hparams = read_hparams(metadata, family.gguf_name, path)
    refuse_unlike(hparams, by_layer, encodes=family.encodes)
    size = hparams.size
    n_mtp = size("nextn_predict_layers", 0)
    n_layers = size("block_count") - n_mtp
    if not size("head_count") or not size("embedding_length") or n_layers < 1:
        raise FormatError(
            f"{path}: {n_layers} layers of {size('embedding_length')} columns and {size('head_count')} heads:"
            f" expected a {family.gguf_name} model"
        )
    if "token_embd.weight" not in shapes:
        raise MissingTensor(f"{path}: no tensor token_embd.weight")
    rope = read_rotation(hparams)
    return DecoderConfig(
        architecture=family.gguf_name,
        vocab_size=shapes["token_embd.weight"][0],
        hidden_size=size("embedding_length"),
        intermediate_size=size("feed_forward_length", 0),
        num_hidden_layers=n_layers,
        **_attention_fields(hparams, shapes, own_values),
        max_position_embeddings=size("context_length", 0),
        rms_norm_eps=hparams.number("layer_norm_rms_epsilon", 1e-6),
        rope=rope,
        tie_word_embeddings="output.weight" not in shapes,
        mlp_bias="blk.0.ffn_up.bias" in shapes,
        mrope_section=read_sections(hparams),
        **_window_fields(family, hparams, n_layers, rope),
        **expert_fields_of(family, hparams),
        attention_scale=hparams.attention_scale or None,
        embedding_scale=hparams.embedding_scale or None,
        residual_scale=hparams.residual_scale or None,
        logit_scale=hparams.logit_scale or None,
        final_logit_softcapping=hparams.final_logit_softcapping or None,
        num_nextn_predict_layers=n_mtp,
    )


def read_sections(hparams: HParams) -> tuple[int, ...] | None:
    """Return the sections of M-RoPE; None where llama.cpp takes RoPE for plain (use_mrope)."""
    sections = hparams.rope_dimension_sections
    return sections if isinstance(sections, tuple) and min(sections[:2]) > 0 else None


def refuse_sections(hparams: HParams) -> None:
    """Raise UnsupportedCheckpoint for M-RoPE where llama.cpp then rotates other columns together."""
    if read_sections(hparams) is not None:
        raise UnsupportedCheckpoint(
            f"{hparams.path}: {hparams.key('rope_dimension_sections')} is {hparams.rope_dimension_sections},"
            " expected none: the forward pass rotates as models of text alone do"
        )


def refuse_unlike(hparams: HParams, by_layer: Container[str] = (), *, encodes: bool = False) -> None:
    """Raise UnsupportedCheckpoint for what llama.cpp computes by the keys, and the forward pass does not.

    by_layer  fields of HParams that may differ from layer to layer
    encodes   whether tokens may see later ones
    """
    if hparams.attention_causal is False and not encodes:
        raise UnsupportedCheckpoint(
            f"{hparams.path}: {hparams.key('attention_causal')} is false, expected true: the forward pass"
            " lets no token see later ones"
        )
    sections = hparams.rope_dimension_sections
    if isinstance(sections, int):
        sections = (sections,) * 4
    if sections is not None and (len(sections) != 4 or sections[3]):
        raise UnsupportedCheckpoint(
            f"{hparams.path}: {hparams.key('rope_dimension_sections')} is {quoted(sections)}, expected four"
            " numbers, the last one 0: the forward pass has no fourth kind of position"
        )
    for name in _SIZES_OF_LAYERS:
        sizes = getattr(hparams, name)
        if isinstance(sizes, tuple) and len({*sizes}) > 1 and name not in by_layer:
            raise UnsupportedCheckpoint(
                f"{hparams.path}: {hparams.key(name)} differs from layer to layer, expected one number: the"
                f" forward pass has no other for {hparams.architecture}"
            )


_SIZES_OF_LAYERS = (
    "feed_forward_length", "expert_feed_forward_length", "expert_used_count", "head_count", "head_count_kv",
)  # fmt: skip
"""Fields of HParams that llama.cpp reads as one number, or as one for each layer."""


def _window_fields(family: Architecture, hparams: HParams, n_layers: int, rope: RopeConfig) -> dict[str, Any]:
    """Return the fields about layers with a window, where the family has any."""
    if family.windows in ("", "own", "own unstretched"):
        return {}
    interval, window = WINDOW_PERIODS.get(family.gguf_name), hparams.size("sliding_window", 0)
    if keys.SLIDING_WINDOW in LOADERS[family.gguf_name].required:
        window = read_window(hparams, 0)
    if not window:
        return {}
    refuse_sizes_in_windows(hparams)
    return {
        "sliding_window": window,
        "sliding_layers": sliding_layers(hparams, n_layers, interval),
        "sliding_theta": read_theta(hparams, "rope_freq_base_swa", family.window_theta or rope.theta),
    }


def read_window(hparams: HParams, default: int) -> int:
    """Return the positions that a layer with a window sees; raises FormatError for none."""
    window = hparams.size("sliding_window", default)
    if not window:
        raise FormatError(f"{hparams.path}: {hparams.key('sliding_window')} is 0, expected 1 or more")
    return window


def refuse_sizes_in_windows(hparams: HParams) -> None:
    """Raise UnsupportedCheckpoint for layers with a window whose heads have other sizes."""
    for full, own in (
        ("key_length", "key_length_swa"),
        ("value_length", "value_length_swa"),
        ("rope_dimension_count", "rope_dimension_count_swa"),
    ):
        if getattr(hparams, own) not in (None, getattr(hparams, full)):
            raise UnsupportedCheckpoint(
                f"{hparams.path}: {hparams.key(own)} is {getattr(hparams, own)}, expected that of other"
                f" layers ({hparams.key(full)}): the forward pass has no other for {hparams.architecture}"
            )


def read_theta(hparams: HParams, name: str, default: float) -> float:
    """Return the base of a rotation, a field of HParams; raises FormatError for one that no rotation has."""
    theta = hparams.number(name, default)
    if not theta > 1:
        raise FormatError(f"{hparams.path}: {hparams.key(name)} is {theta:g}, expected more than 1")
    return theta


def sliding_layers(hparams: HParams, n_layers: int, interval: int | None) -> tuple[int, ...]:
    """Return the layers that have a window: those that are flagged, or all but every `interval`-th.

    interval  None where llama.cpp takes flags alone; FormatError without them
    """
    pattern = hparams.sliding_window_pattern
    if isinstance(pattern, tuple):
        return tuple(layer for layer, has_window in enumerate(pattern[:n_layers]) if has_window)
    if interval is None:
        key = hparams.key("sliding_window_pattern")
        raise FormatError(f"{hparams.path}: {key} is {quoted(pattern)}, expected a flag for each layer")
    step = interval if pattern is None else pattern
    if not step:
        return tuple(range(n_layers))
    full = 0 if hparams.architecture in FULL_FIRST else step - 1
    return tuple(layer for layer in range(min(n_layers, MAX_LAYERS)) if layer % step != full)


def _attention_fields(
    hparams: HParams, shapes: Mapping[str, tuple[int, ...]], own_values: bool
) -> dict[str, Any]:
    size = hparams.size
    heads = size("head_count")
    kv_heads = size("head_count_kv", heads)
    head_dim = size("key_length", size("embedding_length") // heads)
    value_dim = size("value_length", size("embedding_length") // heads)
    rotated = size("rope_dimension_count", head_dim)
    fits = value_dim > 0 if own_values else value_dim == head_dim
    if not kv_heads or heads % kv_heads or head_dim < 2 or head_dim % 2 or not fits:
        raise FormatError(
            f"{hparams.path}: {heads} heads with {kv_heads} keys of {head_dim} columns and values of"
            f" {value_dim}"
        )
    is_llama = hparams.architecture == "llama"
    if rotated % 2 or not 0 < rotated <= head_dim or (is_llama and rotated != head_dim):
        raise FormatError(
            f"{hparams.path}: {hparams.key('rope_dimension_count')} is {rotated}, and heads have {head_dim}"
            " columns"
        )
    q_norm = shapes.get("blk.0.attn_q_norm.weight")
    return {
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "stated_head_dim": hparams.first("key_length"),
        "v_head_dim": value_dim if own_values else None,
        "rotated_cols": rotated,
        "attention_bias": "blk.0.attn_q.bias" in shapes,
        "output_bias": "blk.0.attn_output.bias" in shapes,
        "qk_norm": q_norm is not None,
        "norms_all_heads": q_norm is not None and q_norm[-1] != head_dim,
    }


def expert_fields_of(family: Architecture, hparams: HParams) -> dict[str, Any]:
    """Return the fields of DecoderConfig about experts."""
    size = hparams.size
    n_experts = size("expert_count", 0)
    return {
        "num_experts": n_experts,
        "num_experts_per_tok": size("expert_used_count", 0),
        "moe_intermediate_size": size("expert_feed_forward_length", size("feed_forward_length", 0)),
        "num_shared_experts": size("expert_shared_count", 0),
        "shared_expert_intermediate_size": size("expert_shared_feed_forward_length", 0),
        "first_k_dense_replace": size("leading_dense_block_count", 0),
        **group_fields(hparams),
        "scoring_func": scoring_function(hparams, GATING_FUNCTIONS, family.unset_gating)
        if n_experts
        else None,
        "norm_topk_prob": bool(hparams.expert_weights_norm) if family.says_norm else True,
        # llama.cpp takes 0 for "no scaling" too.
        "routed_scaling_factor": hparams.number("expert_weights_scale", 1.0) or 1.0,
    }


def limits_of_file(hparams: HParams, n_layers: int) -> dict[str, Any]:
    """Return expert_limits and block_limits of a file, see LIMITS; None for limits that it does not have."""

    def limits(stated: float | tuple[float, ...] | None) -> tuple[float, ...] | None:
        return (stated,) * n_layers if isinstance(stated, float) else stated

    return {
        "expert_limits": limits(hparams.swiglu_clamp_exp), "block_limits": limits(hparams.swiglu_clamp_shexp)
    }  # fmt: skip


def dense_by_routers(shapes: Mapping[str, tuple[int, ...]], n_layers: int) -> int:
    """Return how many layers stand before the first with a router."""
    routed = (layer for layer in range(n_layers) if f"blk.{layer}.ffn_gate_inp.weight" in shapes)
    return next(routed, n_layers)


def group_fields(hparams: HParams) -> dict[str, int]:
    """Return n_group and topk_group, both 1 where experts are not grouped.

    raises  FormatError for groups and experts with which llama.cpp stops
    """
    size = hparams.size
    groups, used = size("expert_group_count", 0), size("expert_group_used_count", 0)
    n_experts, n_used = size("expert_count", 0), size("expert_used_count", 0)
    fits = n_used in range(1, n_experts + 1) if n_experts else not n_used and not groups
    if groups > 1:
        fits = fits and not n_experts % groups and n_experts >= 2 * groups and 0 < used < groups
        fits = fits and n_used <= n_experts // groups * used
    if not fits:
        raise FormatError(
            f"{hparams.path}: {n_experts} experts of which {n_used} are used, in {groups} groups of which"
            f" {used} are used: expected what llama.cpp can choose from"
        )
    return {"n_group": groups, "topk_group": used} if groups > 1 else {"n_group": 1, "topk_group": 1}


def read_rotation(
    hparams: HParams, kinds: Sequence[str] = ("linear", "yarn", "longrope", "none")
) -> RopeConfig:
    """Read the rotation back, as llama.cpp takes it. Llama 3's is a tensor, and no key tells of it.

    Without a kind, it is linear. The factor has a key with an older name, too; 1 where there is neither.
    YaRN's ramp begins and ends at whole pairs.

    kinds   values of rope.scaling.type that the family may have
    raises  UnsupportedCheckpoint for another one
    """
    kind = hparams.rope_scaling_type or "linear"
    if kind not in kinds:
        raise UnsupportedCheckpoint(
            f"{hparams.path}: RoPE scaled by {quoted(kind)}, expected {', '.join(kinds)}"
        )
    theta = read_theta(hparams, "rope_freq_base", 10000.0)
    older = hparams.number("rope_scale_linear", 0.0)
    factor = hparams.number("rope_scaling_factor", older) or 1.0
    context = hparams.size("context_length", 4096)
    positive = "original_context_length", "yarn_beta_fast", "yarn_beta_slow"
    for name in (f"rope_scaling_{name}" for name in positive):
        number = getattr(hparams, name)
        if number is not None and not number > 0:
            raise FormatError(f"{hparams.path}: {hparams.key(name)} is {number}, expected more than 0")
    rope = RopeConfig(
        theta,
        kind,
        factor=factor,
        original_context=hparams.size("rope_scaling_original_context_length", context) or None,
        beta_fast=hparams.rope_scaling_yarn_beta_fast,
        beta_slow=hparams.rope_scaling_yarn_beta_slow,
        # llama.cpp assumes an mscale of 1, but for deepseek2 that of mscale_all_dim.
        mscale=1.0,
        mscale_all_dim=hparams.rope_scaling_yarn_log_multiplier,
    )
    sharper = 1.0 if rope.yarn is None else rope.yarn.rotary_factor
    return replace(rope, attention_factor=sharper * hparams.number("rope_scaling_attn_factor", 1.0))


def scoring_function(hparams: HParams, functions: Mapping[str, int], unset: str | None = None) -> str:
    """Return the scoring function that the keys name.

    functions  the number of each that the family has
    unset      the function where the key is 0 or missing; None: there must be one
    raises     UnsupportedCheckpoint for another number
    """
    number = hparams.size("expert_gating_func", 0)
    if not number and unset is not None:
        return unset
    for name, known in functions.items():
        if number == known:
            return name
    raise UnsupportedCheckpoint(
        f"{hparams.path}: {hparams.key('expert_gating_func')} is {number},"
        f" expected {' or '.join(f'{known} ({name})' for name, known in functions.items())}"
    )
