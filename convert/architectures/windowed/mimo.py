"""MiMo-V2 and MiMo-V2-Flash: values narrower than keys, layers with windows and sinks, three MTP layers.

Layers with a window have other heads of keys and values than those without. What a layer's attention adds is
multiplied by a number. The MTP layers are dense layers with a window.

A MiMo-V2 has queries, keys and values in one matrix. Published in FP8, the matrix stands in parts, as many
as the processes that the model was trained on: each part has the rows of some queries, then of keys, then of
values, and blocks of scales that begin with the part.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from convert.architectures.base import Architecture, Key
from convert.architectures.config_reader import ConfigReader, merged
from convert.architectures.decoder.config import (
    FULL,
    SLIDING,
    DecoderConfig,
    counts_of_kinds,
    decoder_fields,
    expert_fields,
    layers_of_kind,
    leading_dense_layers,
    refuse_factor,
    refuse_no_window,
    rotations_by_kind,
    stated_as,
    with_defaults,
)
from convert.architectures.decoder.family import WINDOWS, decoder, decoder_notes
from convert.architectures.decoder.metadata import (
    COMMON,
    EXPERT_WIDTH,
    ROTATED_COLS,
    SLIDING_THETA,
    SLIDING_WINDOW,
    changed,
    counts_by_layer,
    dense_by_routers,
    inserted,
    read_decoder,
)
from convert.architectures.decoder.rules import (
    INV_FREQ,
    attention,
    biased_router,
    by_window,
    check_mtp,
    dense_blocks,
    ends,
    expert_stacks,
    fused_attention,
    in_layer,
    keep_mtp_of,
    layers,
    moe_layers,
    mtp,
    mtp_layers,
    n_mtp_layers,
    norm_of_blocks,
    own_and_mtp,
)
from convert.architectures.delta_net.arrange import RowsMoved
from convert.architectures.options import MTPOptions
from convert.architectures.rules import Drop, OutputTensor, Rule, renamed
from convert.weights.base import Weight
from convert.weights.schemes.fp8 import Fp8Weight
from gguf_tools.errors import UnsupportedCheckpoint
from gguf_tools.format import keys
from gguf_tools.format.ggml_types import MXFP4
from gguf_tools.format.hparams import read_hparams
from gguf_tools.format.values import Metadata, Value

_MTP_LAYERS = 3
"""MTP layers of all published models; no field says how many."""

_CLASS = "MiMoV2FlashForCausalLM"


@dataclass(frozen=True)
class MiMoConfig(DecoderConfig):
    """Configuration of a model.

    sinks       whether heads have sinks: in layers with a window, in those without
    seen        positions that transformers' class sees in a window; None: as many as `sliding_window` says
    """

    sinks: tuple[bool, bool] = (True, False)
    seen: int | None = None


def read_config(raw: Mapping[str, Any], path: str | Path) -> MiMoConfig:
    """Return the configuration of a MiMo-V2."""
    read = with_defaults(_by_kind(raw, path), path, name=_CLASS)
    theta, rotated = rotations_by_kind(read.raw, path, 5e6, read.number("swa_rope_theta", 1e4))
    own = {"partial_rotary_factor": read.number("partial_rotary_factor", 0.334)}
    read = ConfigReader(merged(rotated, own), path)
    why = "llama.cpp's mimo2 has no other"
    for key, value in (
        ("attention_bias", False), ("norm_topk_prob", True), ("routed_scaling_factor", 1.0),
        ("scoring_func", "sigmoid"), ("topk_method", "noaux_tc"), ("n_shared_experts", 0),
        ("swa_head_dim", read.raw.get("head_dim")), ("swa_v_head_dim", read.raw.get("v_head_dim")),
        ("swa_num_attention_heads", read.raw.get("num_attention_heads")),
    ):  # fmt: skip
        read.fixed(key, value, why)
    fields = decoder_fields(read, eps=stated_as(raw, path, "rms_norm_eps", "layernorm_epsilon"))
    refuse_factor(fields["rope"], path, "mimo2")
    if fields["rotated_cols"] % 2:
        raise read.bad("partial_rotary_factor", "an even number of columns: they are rotated in pairs")
    local = ConfigReader((raw.get("rope_parameters") or {}).get(SLIDING) or {}, path, "rope_parameters.")
    local.fixed(
        "partial_rotary_factor", fields["rope"].partial, "llama.cpp's mimo2 rotates as many in all layers"
    )
    n_layers, window = fields["num_hidden_layers"], read.size("sliding_window")
    size = read.size_or_null("sliding_window_size", None)
    n_mtp = read.size("num_nextn_predict_layers", _MTP_LAYERS, least=0)
    sliding = layers_of_kind(read, n_layers, lambda layer: layer > 0 and (layer + 1) % 6 != 0)
    refuse_no_window(read, sliding)
    local_heads = read.size("swa_num_key_value_heads", 2 * fields["num_key_value_heads"])
    if fields["num_attention_heads"] % local_heads:
        raise read.bad("swa_num_key_value_heads", "a divisor of num_attention_heads")
    return MiMoConfig(
        **fields,
        **expert_fields(read),
        v_head_dim=read.size("v_head_dim"),
        sliding_window=window,
        sliding_layers=(*sliding, *range(n_layers, n_layers + n_mtp)),
        sliding_theta=theta,
        sliding_kv_heads=local_heads,
        attention_value_scale=read.number_or_null("attention_value_scale") or None,
        moe_intermediate_size=read.size("moe_intermediate_size"),
        first_k_dense_replace=leading_dense_layers(read, n_layers, 1),
        n_group=read.size("n_group"),
        topk_group=read.size("topk_group"),
        scoring_func="sigmoid",
        num_nextn_predict_layers=n_mtp,
        dense_mtp=True,
        sinks=(
            read.flag("add_swa_attention_sink_bias", True),
            read.flag("add_full_attention_sink_bias", False),
        ),
        seen=None if size is None else size + 1,
    )


def _by_kind(raw: Mapping[str, Any], path: str | Path) -> Mapping[str, Any]:
    """Return config.json with the kinds of layers and their rotations as transformers' class has them."""
    read, found = ConfigReader(raw, path), dict[str, Any]()
    for key, kinds, names in (
        ("hybrid_layer_pattern", "layer_types", (FULL, SLIDING)),
        ("moe_layer_freq", "mlp_layer_types", ("dense", "sparse")),
    ):
        flags = raw.get(key)
        if flags is None:
            continue
        if not isinstance(flags, list) or any(flag not in (0, 1) for flag in flags):
            raise read.bad(key, "0 or 1 for each layer")
        found[kinds] = [names[flag] for flag in flags]
        read.fixed(kinds, found[kinds], f"{key} says so")
    return merged(raw, found)


def _notes(config: MiMoConfig, options: MTPOptions) -> tuple[str, ...]:
    told = decoder_notes(config, frozenset({WINDOWS}))
    seen, window = config.seen, config.sliding_window
    if seen is None or seen == window:
        return told
    return (
        *told,
        f"sliding_window_size is {seen - 1}: with it, transformers lets layers with a window see {seen}"
        f" positions; the file says {window}, as llama.cpp's converter does",
    )


def _read_file(
    family: Architecture, metadata: Metadata, shapes: Mapping[str, tuple[int, ...]], path: str | Path
) -> MiMoConfig:
    """Return the configuration in a file, see `read_decoder`; the first layers have no router."""
    plain = read_decoder(family, metadata, shapes, path, by_layer=("head_count_kv",), own_values=True)
    hparams = read_hparams(metadata, family.gguf_name, path)
    n_layers, heads = plain.num_hidden_layers, hparams.head_count_kv
    every = heads[:n_layers] if isinstance(heads, tuple) else (plain.num_key_value_heads,) * n_layers
    full, local = counts_of_kinds(every, plain.sliding_layers, n_layers, path, "heads of keys")
    own = {
        "num_key_value_heads": full,
        "sliding_kv_heads": local,
        "attention_value_scale": hparams.attention_value_scale or None,
        "first_k_dense_replace": dense_by_routers(shapes, n_layers),
        "norm_topk_prob": True,
        "scoring_func": "sigmoid",
        "routed_scaling_factor": 1.0,
        "dense_mtp": True,
    }
    return MiMoConfig(**{**vars(plain), **own})


def _sink_layers(config: MiMoConfig, options: MTPOptions) -> list[int]:
    in_windows, elsewhere = config.sinks
    return [
        layer
        for layer in layers(config, options)
        if (in_windows if layer in config.sliding_layers else elsewhere)
    ]


_PARTS = (8, 4)
"""Parts of published models' queries, keys and values, in the order in which llama.cpp's converter tries."""


def _joined(name: str, weights: Sequence[Weight], config: MiMoConfig) -> OutputTensor:
    """Return queries, keys and values as one matrix, of parts with scales of their own where it is in FP8.

    raises  UnsupportedCheckpoint where the scales don't tell in how many parts it stands
    """
    (weight,) = weights
    if not weight.stored_as.startswith("F8"):
        return renamed(name, weights, config)
    n_rows, n_cols = weight.shape
    if isinstance(weight, Fp8Weight):
        n_stored, n_blocks = weight.scales.grid
        for n_parts in _PARTS:
            per_part = n_rows // n_parts
            of_part = -(-per_part // weight.scales.block[0])
            if per_part * n_parts == n_rows and n_stored == n_parts * of_part:
                scales = replace(weight.scales, grid=(of_part, n_blocks))
                parts = replace(weight, shape=(n_parts, per_part, n_cols), scales=scales)
                return RowsMoved(name, weight.shape, weight.type, parts, _order(n_rows, n_parts, config))
    raise UnsupportedCheckpoint(
        f"{weight.name}: {n_rows} rows as {weight.stored_as}, expected"
        f" {' or '.join(map(str, _PARTS))} parts with blocks of scales of their own"
    )


def _order(n_rows: int, n_parts: int, config: MiMoConfig) -> np.ndarray:
    """Return for each row of queries, then keys, then values, where it stands in parts, int64 (n_rows,)."""
    per_head = config.head_dim + config.value_cols
    n_heads = (n_rows - config.q_rows) // per_head
    sizes = (config.q_rows, n_heads * config.head_dim, n_heads * config.value_cols)
    parts = np.arange(n_rows).reshape(n_parts, -1)
    ends = np.cumsum([size // n_parts for size in sizes])[:-1]
    return np.concatenate([part.reshape(-1) for part in np.split(parts, ends, axis=1)])


_QKV = "model.layers.{layer}.self_attn.qkv_proj.weight"


def _attention() -> Iterator[Rule]:
    """Yield the rules of attention, whose queries, keys and values are one matrix or three."""
    for rule in by_window(*attention()):
        apart = rule.outputs[0].name.startswith(tuple(f"blk.{{layer}}.attn_{part}." for part in "qkv"))
        yield replace(rule, unless=(_QKV,)) if apart else rule
    whole = fused_attention()[-1]
    whole = replace(whole, outputs=(replace(whole.outputs[0], arrange=_joined),), when=(_QKV,))
    yield from by_window(whole)


def _rules() -> Iterator[Rule]:
    yield from ends(needs_output=True)
    for rule in (
        *_attention(),
        in_layer(_sink_layers, "attn_sinks.weight", "self_attn.attention_sink_bias", "num_attention_heads"),
        norm_of_blocks(),
        *dense_blocks(),
        *biased_router(),
        *expert_stacks(moe_layers, order="gate up down"),
        *(rule for rule in mtp() if not rule.outputs[0].name.endswith("head_norm.weight")),
        in_layer(mtp_layers, "layer_output_norm.weight", "final_layernorm.weight", "hidden_size"),
    ):
        yield from own_and_mtp(rule, "model.mtp.layers.{layer.index}.")


def _drops(config: MiMoConfig, options: MTPOptions) -> Iterable[Drop]:
    mtp_weights = Drop(
        lambda name: name.startswith("model.mtp."), "multi-token prediction layer; kept without --no-mtp"
    )
    return (INV_FREQ, _OTHER_PARTS, *(() if n_mtp_layers(config, options) else (mtp_weights,)))


_OTHER_PARTS = Drop(
    lambda name: name.startswith(("visual.", "audio_encoder.", "speech_embeddings.")),
    "part for images and sound; the file holds the text part",
)

_FAMILY = decoder(
    _CLASS,
    "MiMoV2ForCausalLM",
    gguf_name="mimo2",
    options=MTPOptions,
    read_config=read_config,
    rules=tuple(_rules()),
    metadata=(
        *changed(
            inserted(
                [key for key in COMMON if key.name != keys.LAYERNORM_RMS_EPS],
                SLIDING_THETA,
                after=keys.ROPE_FREQ_BASE,
            ),
            counts_by_layer(keys.HEAD_COUNT_KV, "num_key_value_heads"),
        ),
        SLIDING_WINDOW,
        Key(keys.SLIDING_WINDOW_PATTERN, Value.i32s,
            lambda c, o: [int(layer in c.sliding_layers) for layer in layers(c, o)]),
        EXPERT_WIDTH, ROTATED_COLS, *(key for key in COMMON if key.name == keys.LAYERNORM_RMS_EPS),
        Key(keys.VALUE_SCALE, Value.f32, lambda c, o: c.attention_value_scale),
        Key(keys.NEXTN_PREDICT_LAYERS, Value.u32, lambda c, o: n_mtp_layers(c, o) or None),
    ),
    drops=_drops,
    notes=_notes,
    check=check_mtp,
    resolve_options=partial(keep_mtp_of, "model.mtp.layers.0.eh_proj.weight"),
    canonical_name=lambda name: name.replace(".self_attn.sinks", ".self_attn.attention_sink_bias"),
    kept=frozenset({MXFP4}),
    reader=_read_file,
    unset_gating="sigmoid",
    windows="unstretched",
    window_theta=1e4,
)  # fmt: skip

FAMILIES = (_FAMILY,)
