"""Phi 3 and 4: queries, keys and values are one matrix, gate and up another; long contexts have divisors.

The divisors of frequencies are two tables, one for texts within the original context and one for longer ones.
The file has both as tensors, and what rotated columns are multiplied by as a key.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from convert.architectures.base import Key
from convert.architectures.config_reader import ConfigReader
from convert.architectures.decoder.config import DecoderConfig, decoder_fields, fix_head_dim, with_defaults
from convert.architectures.decoder.family import decoder, window_notes
from convert.architectures.decoder.metadata import CONTEXT, EMBEDDING, HEADS, WIDTH
from convert.architectures.decoder.rules import (
    ends,
    fused_attention,
    fused_blocks,
    layers_if,
    norm_of_blocks,
    once,
)
from convert.architectures.rules import Arrange, Computed, Output, OutputTensor, Rule
from convert.weights.base import Weight
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
    fields = decoder_fields(read)
    fix_head_dim(read, fields, "phi3")
    rope, n_layers = fields["rope"], fields["num_hidden_layers"]
    if rope.kind not in ("default", "longrope"):
        raise read.bad("rope_scaling", "none, or one of type longrope")
    stated = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    inside = ConfigReader(stated, path, "rope_scaling.")
    context = read.size("original_max_position_embeddings")
    long, short = (
        _divisors(inside, key, fields["rotated_cols"] // 2) if rope.kind == "longrope" else ()
        for key in ("long_factor", "short_factor")
    )
    factor = rope.factor or fields["max_position_embeddings"] / context
    magnitude = math.sqrt(1 + math.log(factor) / math.log(context)) if factor > 1 else 1.0
    if rope.attention_factor is not None:
        magnitude = rope.attention_factor
    fields["rope"] = replace(rope, original_context=context, attention_factor=magnitude if long else None)
    window = read.size_or_null("sliding_window", None)
    return Phi3Config(
        **fields,
        sliding_window=window,
        sliding_layers=tuple(range(n_layers)),
        short_factor=short,
        long_factor=long,
    )


def _divisors(inside: ConfigReader, key: str, count: int) -> tuple[float, ...]:
    values = inside.raw.get(key)
    if not isinstance(values, list) or len(values) != count:
        raise inside.bad(key, f"{count} numbers, one for each pair of rotated columns")
    return tuple(ConfigReader({key: value}, inside.path, inside.prefix).number(key) for value in values)


def _table(values: Callable[[Phi3Config], tuple[float, ...]]) -> Arrange:
    def made(name: str, weights: Sequence[Weight], config: Phi3Config) -> OutputTensor:
        return Computed(name, np.array(values(config), np.float32))

    return made


_u32, _f32 = Value.u32, Value.f32

_PHI3 = decoder(
    "Phi3ForCausalLM",
    gguf_name="phi3",
    read_config=read_config,
    rules=(
        Rule(layers_if("long_factor", once), (
            Output("rope_factors_long.weight", "", "", _table(lambda config: config.long_factor)),
            Output("rope_factors_short.weight", "", "", _table(lambda config: config.short_factor)),
        )),
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

FAMILIES = (_PHI3,)
