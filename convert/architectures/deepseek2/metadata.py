"""The keys deepseek2.*: METADATA writes them from a configuration, and `read_deepseek_file` is its
inverse.

What the keys say of the heads depends on the layout of attention:

    split       one key head of kv_lora + rope columns, as it is cached; the uncompressed sizes in keys of
                their own
    both, none  the uncompressed heads

Where this deliberately differs from llama.cpp's own converter:

    expert_gating_func   always written. That converter copies scoring_func, and a V3 config.json without
                         one becomes a softmax model.
    expert_weights_norm  not written for V2: the model ignores norm_topk_prob.
    expert_weights_scale always written: what the model computes with when config.json doesn't say.
    expert_group_count   1 where the choice of experts isn't restricted (V2 with topk_method greedy; all
                         groups used), because llama.cpp restricts by groups whenever there are several,
                         and stops when all of several may be used.
    yarn_beta_*          always written with YaRN.
    block_count          counts the MTP layers that are kept; the loader splits them off again by
                         nextn_predict_layers.

The keys can't say everything that config.json says. The reader fills in what llama.cpp computes with:

    architecture    V3 where a layer has a selection bias, V2 otherwise
    topk_method     V3's noaux_tc or V2's group_limited_greedy. V2's greedy is written as one group
    n_group         1 where the choice of experts isn't restricted
    mscale          taken for equal to mscale_all_dim, and of later families for 1
    norm_requested  what the model does
    MTP layers      none where the file has none
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from convert.architectures.base import Architecture, Key
from convert.architectures.decoder.metadata import (
    DENSE_LAYERS,
    EXPERT_WIDTH,
    EXPERTS,
    GATING_FUNCTIONS,
    ROTATED_COLS,
    SHARED_EXPERTS,
    SIZES,
    USED_EXPERTS,
    VOCAB_SIZE,
    expert_fields_of,
    read_rotation,
    refuse_unlike,
    scoring_function,
)
from convert.architectures.decoder.rope import RopeConfig
from convert.architectures.decoder.rules import layers, mtp_layers
from convert.architectures.deepseek2.config import V2, V3, DeepseekConfig
from convert.architectures.options import LatentOptions
from gguf_tools.errors import FormatError, MissingTensor, UnsupportedCheckpoint
from gguf_tools.format import keys
from gguf_tools.format.hparams import HParams, read_hparams
from gguf_tools.format.values import Metadata, Value
from gguf_tools.text import quoted

GGUF_NAME = "deepseek2"
"""Name of the family in general.architecture."""


def _uncompressed(options: LatentOptions) -> bool:
    """Return whether the file describes the heads as they are before compression, as for plain attention."""
    return options.mla != "split"


def _norm(config: DeepseekConfig, options: LatentOptions) -> bool | None:
    """Return true, else None to leave the key out; with "both" false, as ik_llama.cpp's converter does."""
    return config.norm_topk_prob or (False if options.mla == "both" else None)


def _key_length(config: DeepseekConfig, options: LatentOptions) -> int:
    return config.head_dim if _uncompressed(options) else config.kv_a_rows


def _value_length(config: DeepseekConfig, options: LatentOptions) -> int:
    return config.v_head_dim if _uncompressed(options) else config.kv_lora_rank


def _log_multiplier(config: DeepseekConfig, options: LatentOptions) -> float | None:
    """Return a tenth of mscale_all_dim; the loader multiplies by ten again."""
    if config.yarn is None or config.yarn.mscale_all_dim is None:
        return None
    return 0.1 * config.yarn.mscale_all_dim


_u32, _f32, _bool, _string = Value.u32, Value.f32, Value.bool_, Value.string

METADATA: tuple[Key, ...] = (
    Key(keys.BLOCK_COUNT, _u32, lambda c, o: len(layers(c, o))),
    *SIZES,
    Key(keys.HEAD_COUNT_KV, _u32, lambda c, o: c.num_attention_heads if _uncompressed(o) else 1),
    Key(keys.ROPE_SCALING_TYPE, _string, lambda c, o: c.yarn and "yarn"),
    Key(keys.ROPE_SCALING_FACTOR, _f32, lambda c, o: c.yarn and c.yarn.factor),
    Key(keys.ROPE_SCALING_ORIG_CTX_LEN, _u32, lambda c, o: c.yarn and c.yarn.original_context),
    Key(keys.ROPE_SCALING_YARN_ATTN_FACTOR, _f32, lambda c, o: c.yarn and c.yarn.attention_factor),
    Key(keys.ROPE_SCALING_YARN_BETA_FAST, _f32, lambda c, o: c.yarn and c.yarn.beta_fast),
    Key(keys.ROPE_SCALING_YARN_BETA_SLOW, _f32, lambda c, o: c.yarn and c.yarn.beta_slow),
    Key(keys.ROPE_FREQ_BASE, _f32, lambda c, o: c.rope.theta),
    Key(keys.LAYERNORM_RMS_EPS, _f32, lambda c, o: c.rms_norm_eps),
    EXPERTS,
    USED_EXPERTS,
    Key(keys.EXPERT_GROUP_COUNT, _u32, lambda c, o: c.expert_groups and c.expert_groups[0]),
    Key(keys.EXPERT_GROUP_USED_COUNT, _u32, lambda c, o: c.expert_groups and c.expert_groups[1]),
    Key(
        keys.EXPERT_GATING_FUNC,
        _u32,
        lambda c, o: GATING_FUNCTIONS[c.scoring_func] if c.num_experts else None,
    ),
    Key(keys.KEY_LENGTH, _u32, lambda c, o: _key_length(c, o) if c.lengths_first else None),
    Key(keys.VALUE_LENGTH, _u32, lambda c, o: _value_length(c, o) if c.lengths_first else None),
    DENSE_LAYERS,
    VOCAB_SIZE,
    Key(keys.Q_LORA_RANK, _u32, lambda c, o: c.q_lora_rank),
    Key(keys.KV_LORA_RANK, _u32, lambda c, o: c.kv_lora_rank),
    Key(keys.KEY_LENGTH, _u32, lambda c, o: None if c.lengths_first else _key_length(c, o)),
    Key(keys.VALUE_LENGTH, _u32, lambda c, o: None if c.lengths_first else _value_length(c, o)),
    # These two tell llama.cpp that the heads are compressed.
    Key(keys.KEY_LENGTH_MLA, _u32, lambda c, o: None if _uncompressed(o) else c.head_dim),
    Key(keys.VALUE_LENGTH_MLA, _u32, lambda c, o: None if _uncompressed(o) else c.v_head_dim),
    EXPERT_WIDTH,
    SHARED_EXPERTS,
    Key(keys.EXPERT_WEIGHTS_SCALE, _f32, lambda c, o: c.routed_scaling_factor if c.num_experts else None),
    Key(keys.EXPERT_WEIGHTS_NORM, _bool, _norm),
    ROTATED_COLS,
    Key(keys.ROPE_SCALING_YARN_LOG_MUL, _f32, _log_multiplier),
    Key(keys.NEXTN_PREDICT_LAYERS, _u32, lambda c, o: len(mtp_layers(c, o)) or None),
)


# ---- reading them back


def read_deepseek_file(
    family: Architecture,
    metadata: Metadata,
    shapes: Mapping[str, tuple[int, ...]],
    path: str | Path,
    *,
    by_layer: Container[str] = (),
    rotates: bool = True,
) -> DeepseekConfig:
    """Read the configuration out of the keys and tensors of a GGUF file.

    shapes    tensor name -> shape, rows first
    path      the file, for messages
    by_layer  as in `read_decoder`
    rotates   whether heads have rotated columns
    raises    FormatError, MissingTensor, UnsupportedCheckpoint, naming the file and the key
    """
    hparams = read_hparams(metadata, family.gguf_name, path)
    refuse_unlike(hparams, by_layer)
    size = hparams.size
    n_mtp = size("nextn_predict_layers", 0)
    n_layers = size("block_count") - n_mtp
    if "token_embd.weight" not in shapes:
        raise MissingTensor(f"{path}: no tensor token_embd.weight")
    has_q_lora = any(name.endswith("attn_q_a.weight") for name in shapes)
    # A bias for the choice of experts tells V3 from V2.
    has_bias = any(name.endswith("exp_probs_b.bias") for name in shapes)
    heads, experts = _head_fields(hparams, n_layers, rotates=rotates), expert_fields_of(family, hparams)
    unset = _unset_scoring(family, n_layers, shapes["token_embd.weight"][0])
    return DeepseekConfig(
        architecture=V3 if has_bias else V2,
        vocab_size=shapes["token_embd.weight"][0],
        hidden_size=size("embedding_length"),
        intermediate_size=size("feed_forward_length", 0),
        num_hidden_layers=n_layers,
        **heads,
        q_lora_rank=size("q_lora_rank") if has_q_lora else None,
        kv_lora_rank=size("kv_lora_rank"),
        **experts | {"scoring_func": scoring_function(hparams, GATING_FUNCTIONS, unset)},
        topk_method="noaux_tc" if has_bias else "group_limited_greedy",
        norm_requested=experts["norm_topk_prob"],
        rms_norm_eps=hparams.number("layer_norm_rms_epsilon", 1e-6),
        max_position_embeddings=size("context_length", 0),
        rope=_read_rope(hparams),
        tie_word_embeddings="output.weight" not in shapes,
        num_nextn_predict_layers=n_mtp,
        # llama.cpp takes 0 for "none" too.
        sharpness=(hparams.temperature_scale, size("temperature_length") or size("context_length", 0))
        if hparams.temperature_scale
        else None,
    )


def _unset_scoring(family: Architecture, n_layers: int, vocab_size: int) -> str:
    """Return how experts are scored where no key says it: llama.cpp knows GLM-4.7-Flash by its sizes."""
    is_flash = family.gguf_name == GGUF_NAME and n_layers in (47, 48) and vocab_size == 154880
    return "sigmoid" if is_flash else family.unset_gating


def _head_fields(hparams: HParams, n_layers: int, *, rotates: bool) -> dict[str, Any]:
    size = hparams.size
    heads, rope = size("head_count"), size("rope_dimension_count")
    qk_head = size("key_length_mla", 0) or size("key_length")
    value_head = size("value_length_mla", 0) or size("value_length")
    if min(n_layers, heads, value_head) < 1 or rope < rotates or qk_head <= rope or rope % 2:
        raise FormatError(
            f"{hparams.path}: {n_layers} layers, {heads} heads, {rope} of {qk_head} key columns rotated,"
            f" {value_head} value columns: expected a {hparams.architecture} model"
        )
    return {
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": qk_head,
        "stated_head_dim": None,
        "rotated_cols": rope,
        "v_head_dim": value_head,
    }


def _read_rope(hparams: HParams) -> RopeConfig:
    """Read what stretches the rotation, and what makes scores sharper: attention_factor, and mscale_all_dim.

    A factor that the file names beside a rotation that is not stretched is YaRN that stretches by one.
    """
    rope = read_rotation(hparams)
    if rope.kind not in ("yarn", "none") and rope.factor != 1.0:
        raise UnsupportedCheckpoint(
            f"{hparams.path}: RoPE scaled by {quoted(rope.kind)}, expected 'yarn' or none: the forward pass"
            f" has no other for {hparams.architecture}"
        )
    if rope.kind != "yarn" and rope.attention_factor == 1.0:
        return RopeConfig(rope.theta)
    log = rope.mscale_all_dim
    # What the converter has written a tenth of.
    mscale = None if log is None else 10 * log
    stretched = replace(
        rope,
        kind="yarn",
        factor=rope.factor or 1.0 if rope.kind == "yarn" else 1.0,
        original_context=rope.original_context or 1,
        mscale=mscale if hparams.architecture == GGUF_NAME else 1.0,
        mscale_all_dim=mscale,
        attention_factor=rope.attention_factor if rope.kind != "yarn" else None,
    )
    if rope.kind != "yarn" or stretched.yarn is None:
        return stretched
    factor = stretched.yarn.rotary_factor * hparams.number("rope_scaling_attn_factor", 1.0)
    return replace(stretched, attention_factor=factor)
