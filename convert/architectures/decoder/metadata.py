"""The keys that all decoders have, in the order of llama.cpp's converter: COMMON writes them.

What a configuration lacks is left out: a dense model has no keys about experts.
"""

from __future__ import annotations

from typing import Any

from convert.architectures.base import Key
from convert.architectures.decoder.config import DecoderConfig
from convert.architectures.decoder.places import layers
from convert.architectures.gating import GATING_FUNCTIONS
from gguf_tools.format import keys
from gguf_tools.format.values import Value

_u32, _f32, _bool, _string = Value.u32, Value.f32, Value.bool_, Value.string

_SCALING_KEYS = ("linear", "yarn", "longrope")
"""Kinds of RoPE that have keys; of the last, its name alone."""


def _scaling(config: DecoderConfig, options: Any) -> str | None:
    return config.rope.kind if config.rope.kind in _SCALING_KEYS else None


def _yarn(name: str) -> Any:
    return lambda c, o: getattr(c.rope, name) if c.rope.kind == "yarn" else None


GATING = Key(keys.EXPERT_GATING_FUNC, _u32, lambda c, o: c.scoring_func and GATING_FUNCTIONS[c.scoring_func])

COMMON: tuple[Key, ...] = (
    Key(keys.BLOCK_COUNT, _u32, lambda c, o: len(layers(c, o))),
    Key(keys.CONTEXT_LENGTH, _u32, lambda c, o: c.max_position_embeddings),
    Key(keys.EMBEDDING_LENGTH, _u32, lambda c, o: c.hidden_size),
    Key(keys.FEED_FORWARD_LENGTH, _u32, lambda c, o: c.intermediate_size),
    Key(keys.HEAD_COUNT, _u32, lambda c, o: c.num_attention_heads),
    Key(keys.HEAD_COUNT_KV, _u32, lambda c, o: c.num_key_value_heads),
    Key(keys.ROPE_SCALING_TYPE, _string, _scaling),
    Key(keys.ROPE_SCALING_FACTOR, _f32,
        lambda c, o: c.rope.factor if c.rope.kind in ("linear", "yarn") else None),
    Key(keys.ROPE_SCALING_ORIG_CTX_LEN, _u32, _yarn("original_context")),
    Key(keys.ROPE_SCALING_YARN_EXT_FACTOR, _f32, _yarn("extrapolation_factor")),
    Key(keys.ROPE_SCALING_YARN_ATTN_FACTOR, _f32, _yarn("written_factor")),
    Key(keys.ROPE_SCALING_YARN_BETA_FAST, _f32, _yarn("beta_fast")),
    Key(keys.ROPE_SCALING_YARN_BETA_SLOW, _f32, _yarn("beta_slow")),
    Key(keys.ROPE_FREQ_BASE, _f32, lambda c, o: c.rope.theta),
    Key(keys.LAYERNORM_RMS_EPS, _f32, lambda c, o: c.rms_norm_eps),
    Key(keys.EXPERT_COUNT, _u32, lambda c, o: c.num_experts or None),
    Key(keys.EXPERT_USED_COUNT, _u32, lambda c, o: c.num_experts_per_tok or None),
    Key(keys.EXPERT_GROUP_COUNT, _u32, lambda c, o: c.n_group),
    Key(keys.EXPERT_GROUP_USED_COUNT, _u32, lambda c, o: c.topk_group),
    GATING,
    Key(keys.KEY_LENGTH, _u32, lambda c, o: c.stated_head_dim),
    Key(keys.VALUE_LENGTH, _u32, lambda c, o: c.stated_head_dim),
)  # fmt: skip

EXPERT_WIDTH = Key(keys.EXPERT_FEED_FORWARD_LENGTH, _u32, lambda c, o: c.moe_intermediate_size or None)
ROTATED_COLS = Key(keys.ROPE_DIMENSION_COUNT, _u32, lambda c, o: c.rotated_cols)
DENSE_LAYERS = Key(keys.LEADING_DENSE_BLOCK_COUNT, _u32, lambda c, o: c.first_k_dense_replace)
SHARED_EXPERTS = Key(keys.EXPERT_SHARED_COUNT, _u32, lambda c, o: c.num_shared_experts)
EXPERT_SCALE = Key(keys.EXPERT_WEIGHTS_SCALE, _f32, lambda c, o: c.routed_scaling_factor)
EXPERT_NORM = Key(keys.EXPERT_WEIGHTS_NORM, _bool, lambda c, o: c.norm_topk_prob)
SLIDING_WINDOW = Key(keys.SLIDING_WINDOW, _u32, lambda c, o: c.sliding_window)
VOCAB_SIZE = Key(keys.VOCAB_SIZE, _u32, lambda c, o: c.vocab_size)
