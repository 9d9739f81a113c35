"""Laguna: experts chosen with a bias, and attention whose output is multiplied by softplus of a gate.

Layers with a window may have another number of heads than those without, and rotate by a theta of their own,
another share of columns. A gate has a number for each head, or one for each column.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
    rotations_by_kind,
    with_defaults,
)
from convert.architectures.decoder.family import WINDOWS, decoder
from convert.architectures.decoder.metadata import (
    COMMON,
    DENSE_LAYERS,
    EXPERT_NORM,
    EXPERT_SCALE,
    EXPERT_WIDTH,
    GATING,
    ROTATED_COLS,
    SHARED_WIDTH,
    SLIDING_THETA,
    SLIDING_WINDOW,
    VOCAB_SIZE,
    changed,
    counts_by_layer,
    inserted,
    read_decoder,
    read_theta,
    sliding_layers,
)
from convert.architectures.decoder.rules import (
    attention,
    biased_router,
    by_window,
    dense_blocks,
    ends,
    expert_stacks,
    in_layer,
    layers,
    moe_layers,
    norm_of_blocks,
    respelled,
    shared_experts,
)
from convert.tokenizer.files import Quirks
from gguf_tools.errors import FormatError
from gguf_tools.format import keys
from gguf_tools.format.hparams import read_hparams
from gguf_tools.format.loaders import WINDOW_PERIODS
from gguf_tools.format.values import Metadata, Value

_ROTATIONS = {
    FULL: {"rope_type": "default", "rope_theta": 500000.0, "partial_rotary_factor": 0.5},
    SLIDING: {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0},
}
"""rope_parameters where config.json has none, as in transformers' class."""

_PERIOD = WINDOW_PERIODS["laguna"]


@dataclass(frozen=True)
class LagunaConfig(DecoderConfig):
    """Configuration of a model.

    gate_cols  numbers of a gate for each head: 1, or the columns of a head
    """

    gate_cols: int = 1

    @property
    def gate_rows(self) -> int:
        """Rows of g_proj in layers without a window."""
        return self.num_attention_heads * self.gate_cols


def read_config(raw: Mapping[str, Any], path: str | Path) -> LagunaConfig:
    """Return the configuration of a Laguna."""
    stated = raw.get("rope_parameters") or _ROTATIONS
    theta, raw = rotations_by_kind(merged(raw, {"rope_parameters": stated}), path, 5e5, 1e4)
    read = with_defaults(raw, path)
    why = "llama.cpp's laguna has no other"
    read.fixed("attention_bias", False, why)
    read.fixed("moe_apply_router_weight_on_input", False, why)
    read.fixed("moe_router_logit_softcapping", 0.0, why)
    fields = decoder_fields(read)
    n_layers, head_dim = fields["num_hidden_layers"], fields["head_dim"]
    sliding = layers_of_kind(read, n_layers, lambda layer: False)
    local = ConfigReader(stated.get(SLIDING) or {}, path, f"rope_parameters.{SLIDING}.")
    if local.raw:
        share = local.number_or_null("partial_rotary_factor")
        fields |= {"sliding_theta": theta, "sliding_cols": int(head_dim * (1.0 if share is None else share))}
    if sliding:
        fields |= {"sliding_window": read.size("sliding_window"), "sliding_layers": sliding}
    else:
        read.overruled("sliding_window")
    by_layer = read.raw.get("num_attention_heads_per_layer") or [fields["num_attention_heads"]] * n_layers
    heads, local_heads = counts_of_kinds(
        by_layer, sliding, n_layers, path, "heads (num_attention_heads_per_layer)"
    )
    fields |= {"num_attention_heads": heads, "sliding_heads": local_heads}
    gating = read.raw.get("gating")
    if gating not in (True, "per-head", "per-element"):
        raise read.bad("gating", "true, 'per-head' or 'per-element'")
    return LagunaConfig(
        **fields,
        **expert_fields(read),
        qk_norm=True,
        moe_intermediate_size=read.size("moe_intermediate_size"),
        shared_expert_intermediate_size=read.size("shared_expert_intermediate_size"),
        first_k_dense_replace=leading_dense_layers(read, n_layers, 1),
        scoring_func="sigmoid",
        routed_scaling_factor=read.number("moe_routed_scaling_factor", 1.0),
        gate_cols=head_dim if gating == "per-element" else 1,
    )


def _read_file(
    family: Architecture, metadata: Metadata, shapes: Mapping[str, tuple[int, ...]], path: str | Path
) -> LagunaConfig:
    """Return the configuration in a file, see `read_decoder`: the first of four layers has no window."""
    plain = read_decoder(family, metadata, shapes, path, by_layer=("head_count",))
    hparams = read_hparams(metadata, family.gguf_name, path)
    n_layers, window = plain.num_hidden_layers, hparams.size("sliding_window", 0)
    pattern = hparams.sliding_window_pattern
    n_flags = len(pattern) if isinstance(pattern, tuple) else n_layers
    cols = hparams.size("rope_dimension_count_swa", plain.rotated_cols)
    if n_flags < n_layers or cols % 2 or not 0 < cols <= plain.head_dim:
        raise FormatError(
            f"{path}: windows of {n_flags} of {n_layers} layers, which rotate {cols} columns of"
            f" {plain.head_dim}"
        )
    sliding = sliding_layers(hparams, n_layers, _PERIOD) if window else ()
    heads = hparams.head_count if isinstance(hparams.head_count, tuple) else (hparams.head_count,) * n_layers
    full_heads, local_heads = counts_of_kinds(heads[:n_layers], sliding, n_layers, path)
    gate_rows = shapes.get("blk.0.attn_gate.weight", (0,))[0]
    own = {
        "num_attention_heads": full_heads,
        "sliding_heads": local_heads,
        "sliding_window": window or None,
        "sliding_layers": sliding,
        "sliding_theta": read_theta(hparams, "rope_freq_base_swa", plain.rope.theta),
        "sliding_cols": cols,
        "gate_cols": plain.head_dim if gate_rows == (heads[0] or 0) * plain.head_dim else 1,
    }
    return LagunaConfig(**{**vars(plain), **own})


_GATE = in_layer(layers, "attn_gate.weight", "self_attn.g_proj.weight", "gate_rows hidden_size")


_canonical_name = respelled(
    (".mlp.gate.e_score_correction_bias", ".mlp.experts.e_score_correction_bias"),
    (".mlp.shared_experts.", ".mlp.shared_expert."),
)
"""Names of transformers' class -> published ones, of weights of experts."""


def _pattern(config: LagunaConfig, options: Any) -> list[bool] | None:
    """Return which layers have a window, where they are not those that llama.cpp takes."""
    flags = [layer in config.sliding_layers for layer in range(config.num_hidden_layers)]
    usual = [layer % _PERIOD != 0 for layer in range(config.num_hidden_layers)]
    return None if config.sliding_window is None or flags == usual else flags


_LAGUNA = decoder(
    "LagunaForCausalLM",
    gguf_name="laguna",
    read_config=read_config,
    rules=(
        *ends(),
        *by_window(*attention(), _GATE),
        norm_of_blocks(),
        *dense_blocks(),
        *biased_router("experts.e_score_correction_bias"),
        *expert_stacks(moe_layers, order="gate up down"),
        *shared_experts(moe_layers, "shared_expert"),
    ),
    metadata=(
        *changed(
            inserted([key for key in COMMON if key is not GATING], SLIDING_THETA, after=keys.ROPE_FREQ_BASE),
            counts_by_layer(keys.HEAD_COUNT, "num_attention_heads"),
        ),
        VOCAB_SIZE, SLIDING_WINDOW, Key(keys.SLIDING_WINDOW_PATTERN, Value.bools, _pattern), EXPERT_WIDTH,
        SHARED_WIDTH, EXPERT_NORM, EXPERT_SCALE, GATING, DENSE_LAYERS, ROTATED_COLS,
        Key(keys.ROPE_DIMENSION_COUNT_SWA, Value.u32, lambda c, o: c.sliding_cols),
    ),
    says=frozenset({WINDOWS}),
    canonical_name=_canonical_name,
    quirks=Quirks(control=("</assistant>",), listed_eot=True),
    unset_gating="sigmoid",
    says_norm=True,
    reader=_read_file,
    windows="own",
)  # fmt: skip


FAMILIES = (_LAGUNA,)
