"""Phi 3 and 4: queries, keys and values are one matrix, gate and up another; long contexts have divisors.

The divisors of frequencies are two tables, one for texts within the original context and one for longer ones.
The file has both as tensors, and what rotated columns are multiplied by as a key. Phi-3.5-MoE has these, too,
experts in every layer, and biases everywhere but in the experts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from convert.architectures.base import Key
from convert.architectures.config_reader import MAX_LAYERS, ConfigReader
from convert.architectures.decoder.config import (
    DecoderConfig,
    decoder_fields,
    expert_fields,
    fix_head_dim,
    with_defaults,
)
from convert.architectures.decoder.family import decoder, window_notes
from convert.architectures.decoder.metadata import CONTEXT, EMBEDDING, EXPERTS, HEADS, USED_EXPERTS, WIDTH
from convert.architectures.decoder.rules import (
    attention,
    ends,
    fused_attention,
    fused_blocks,
    in_layer,
    layers,
    layers_if,
    norm_of_blocks,
    once,
    one,
    sparse_moe_experts,
    sparse_moe_name,
)
from convert.architectures.options import NoOptions
from convert.architectures.rules import Arrange, Computed, Output, OutputTensor, Rule
from convert.weights.base import Weight
from gguf_tools.errors import UnsupportedCheckpoint
from gguf_tools.format import keys
from gguf_tools.format.values import Value


@dataclass(frozen=True)
class Phi3Config(DecoderConfig):
    """Configuration of a model.

    short_factor, long_factor  divisors of the frequencies; empty where the context is the original one
    """

    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()


def read_config(raw: Mapping[str, Any], path: str | Path) -> Phi3Config:
    """Return the configuration of a Phi 3 or 4."""
    read = with_defaults(raw, path, states_sizes=False)
    read.fixed("attention_bias", False, "llama.cpp's phi3 has none")
    return _read(read, decoder_fields(read), "phi3", read.size("original_max_position_embeddings"))


def _read(
    read: ConfigReader, fields: dict[str, Any], gguf_name: str, context: int, **others: Any
) -> Phi3Config:
    """Return the configuration of `fields` and `others`, with rotation and window.

    context  the original one
    """
    fix_head_dim(read, fields, gguf_name)
    rope = fields["rope"]
    if rope.kind not in ("default", "longrope"):
        raise read.bad("rope_scaling", "none, or one of type longrope")
    inside = _scaling(read)
    long, short = (
        _divisors(inside, key, fields["rotated_cols"] // 2) if rope.kind == "longrope" else ()
        for key in ("long_factor", "short_factor")
    )
    magnitude = rope.attention_factor
    if magnitude is None:
        magnitude = _usual_magnitude(rope.factor or fields["max_position_embeddings"] / context, context)
    fields["rope"] = replace(rope, original_context=context, attention_factor=magnitude if long else None)
    window = read.size_or_null("sliding_window", None)
    return Phi3Config(
        **fields,
        **others,
        sliding_window=window,
        sliding_layers=tuple(range(min(fields["num_hidden_layers"], MAX_LAYERS))),
        short_factor=short,
        long_factor=long,
    )


def _scaling(read: ConfigReader) -> ConfigReader:
    """Return a reader of what config.json says of the rotation, but for the context, which stands beside."""
    stated = read.raw.get("rope_scaling") or read.raw.get("rope_parameters") or {}
    inside = ConfigReader(stated, read.path, "rope_scaling.")
    inside.overruled("original_max_position_embeddings")
    return inside


def _usual_magnitude(factor: float, context: int) -> float:
    """Return the factor of rotated columns for a context that is `factor` times the original one."""
    return math.sqrt(1 + math.log(factor) / math.log(context)) if factor > 1 else 1.0


def _divisors(inside: ConfigReader, key: str, count: int) -> tuple[float, ...]:
    values = inside.raw.get(key)
    if not isinstance(values, list) or len(values) != count:
        raise inside.bad(key, f"{count} numbers, one for each pair of rotated columns")
    return tuple(ConfigReader({key: value}, inside.path, inside.prefix).number(key) for value in values)


def _table(values: Callable[[Phi3Config], tuple[float, ...]]) -> Arrange:
    def made(name: str, weights: Sequence[Weight], config: Phi3Config) -> OutputTensor:
        return Computed(name, np.array(values(config), np.float32))

    return made


_FACTORS = Rule(layers_if("long_factor", once), (
    Output("rope_factors_long.weight", "", "", _table(lambda config: config.long_factor)),
    Output("rope_factors_short.weight", "", "", _table(lambda config: config.short_factor)),
))  # fmt: skip
_u32, _f32 = Value.u32, Value.f32

_PHI3 = decoder(
    "Phi3ForCausalLM",
    gguf_name="phi3",
    read_config=read_config,
    rules=(
        _FACTORS,
        *ends(),
        *fused_attention(),
        norm_of_blocks(),
        *fused_blocks(),
    ),
    metadata=(
        Key(keys.ROPE_SCALING_ATTN_FACTOR, _f32, lambda c, o: c.rope.attention_factor),
        CONTEXT,
        Key(keys.ROPE_SCALING_ORIG_CTX_LEN, _u32, lambda c, o: c.rope.original_context),
        EMBEDDING,
        WIDTH,
        Key(keys.BLOCK_COUNT, _u32, lambda c, o: c.num_hidden_layers),
        HEADS,
        Key(keys.HEAD_COUNT_KV, _u32, lambda c, o: c.num_key_value_heads),
        Key(keys.LAYERNORM_RMS_EPS, _f32, lambda c, o: c.rms_norm_eps),
        Key(keys.ROPE_DIMENSION_COUNT, _u32, lambda c, o: c.rotated_cols),
        Key(keys.ROPE_FREQ_BASE, _f32, lambda c, o: c.rope.theta),
        Key(keys.SLIDING_WINDOW, _u32, lambda c, o: c.sliding_window or 0),
    ),
    notes=lambda config, options: window_notes(config),
)  # fmt: skip


# ---- Phi-3.5-MoE: experts in every layer, biases of norms, attention and output matrix. Where this differs
# from llama.cpp's converter: the file says the model's own factor of rotated columns.


def _read_phimoe(raw: Mapping[str, Any], path: str | Path) -> Phi3Config:
    """Return the configuration of a Phi-3.5-MoE."""
    read = with_defaults(raw, path, name="PhimoeForCausalLM")
    for key in ("attention_bias", "lm_head_bias"):
        if not read.flag(key, False):
            raise read.bad(key, "true: llama.cpp's phimoe loads no file without these biases")
    fields = decoder_fields(read, theta=1e6)
    rope, width = fields["rope"], fields["intermediate_size"]
    if rope.partial not in (None, 1.0):
        raise UnsupportedCheckpoint(
            f"{path}: partial_rotary_factor is {rope.partial:g}, expected 1: the original rotates all columns"
        )
    if rope.kind == "longrope":
        inside = _scaling(read)
        magnitude = inside.number("short_mscale")
        if inside.number("long_mscale") != magnitude:
            raise inside.bad("long_mscale", f"that of short_mscale ({magnitude}): a file has one for both")
        fields["rope"] = replace(rope, attention_factor=magnitude)
    return _read(
        read,
        fields,
        "phimoe",
        rope.original_context or fields["max_position_embeddings"],
        **expert_fields(read),
        moe_intermediate_size=width,
        attention_bias=True,
        output_bias=True,
    )


def _phimoe_notes(config: Phi3Config, options: NoOptions) -> tuple[str, ...]:
    magnitude, context = config.rope.attention_factor, config.rope.original_context or 0
    usual = _usual_magnitude(config.max_position_embeddings / context, context)
    differs = magnitude is not None and abs(magnitude - usual) > 1e-6
    return (
        *window_notes(config),
        "llama.cpp's phimoe takes no mean from what it norms, and makes the weights of a token's experts add"
        " up to one: the original does otherwise (LayerNorm, SparseMixer), and predicts other tokens",
        *((f"rope.scaling.attn_factor is the model's, {magnitude:g}, where llama.cpp's converter writes"
           f" {usual:g}",) if differs else ()),
    )  # fmt: skip


_PHIMOE = decoder(
    "PhiMoEForCausalLM",
    "PhimoeForCausalLM",
    gguf_name="phimoe",
    read_config=_read_phimoe,
    rules=(
        _FACTORS,
        *ends(needs_output=True),
        one(once, "output_norm.bias", "model.norm.bias", "hidden_size"),
        one(once, "output.bias", "lm_head.bias", "vocab_size"),
        *attention(),
        in_layer(layers, "attn_norm.bias", "input_layernorm.bias", "hidden_size"),
        norm_of_blocks(),
        in_layer(layers, "ffn_norm.bias", "post_attention_layernorm.bias", "hidden_size"),
        in_layer(layers, "ffn_gate_inp.weight", "block_sparse_moe.gate.weight", "num_experts hidden_size"),
        *sparse_moe_experts(layers),
    ),
    metadata=(*_PHI3.metadata, USED_EXPERTS, EXPERTS),
    notes=_phimoe_notes,
    canonical_name=lambda name: sparse_moe_name(name.replace(".mlp.router.", ".mlp.gate.")),
)

FAMILIES = (_PHI3, _PHIMOE)
