"""GLM-4.5 and its successors: partial RoPE, sigmoid routing with a bias, a shared expert, an MTP layer."""

from __future__ import annotations

from collections.abc import Container, Mapping
from pathlib import Path
from typing import Any

from convert.architectures.base import Key
from convert.architectures.decoder.config import DecoderConfig, decoder_fields, expert_fields, with_defaults
from convert.architectures.decoder.family import decoder
from convert.architectures.decoder.metadata import (
    COMMON,
    DENSE_LAYERS,
    EXPERT_NORM,
    EXPERT_SCALE,
    EXPERT_WIDTH,
    GATING,
    ROTATED_COLS,
    SHARED_EXPERTS,
)
from convert.architectures.decoder.rules import (
    INV_FREQ,
    attention,
    check_mtp,
    dense_blocks,
    drop_mtp,
    ends,
    expert_stacks,
    in_layer,
    keep_mtp_of,
    layers,
    moe_layers,
    mtp,
    n_mtp_layers,
    shared_experts,
)
from convert.architectures.options import MTPOptions
from convert.architectures.rules import Drop
from convert.tokenizer.files import GLM
from gguf_tools.format import keys
from gguf_tools.format.values import Value


def read_config(raw: Mapping[str, Any], path: str | Path) -> DecoderConfig:
    """Return the configuration of a GLM-4 with experts."""
    read = with_defaults(raw, path)
    fields = {**decoder_fields(read), **expert_fields(read)}
    mtp_key = "num_mtp_layers" if "num_mtp_layers" in raw else "num_nextn_predict_layers"
    read.overruled("num_nextn_predict_layers")
    return DecoderConfig(
        **fields,
        attention_bias=read.flag("attention_bias", False),
        qk_norm=read.flag("use_qk_norm", False),
        moe_intermediate_size=read.size("moe_intermediate_size"),
        num_shared_experts=read.size("n_shared_experts"),
        first_k_dense_replace=read.size("first_k_dense_replace", least=0),
        n_group=read.size("n_group"),
        topk_group=read.size("topk_group"),
        scoring_func="sigmoid",
        norm_topk_prob=read.flag("norm_topk_prob", True),
        routed_scaling_factor=read.number("routed_scaling_factor", 1.0),
        num_nextn_predict_layers=None if raw.get(mtp_key) is None else read.size(mtp_key, least=0),
    )


def resolve_options(config: DecoderConfig, options: MTPOptions, names: Container[str] | None) -> MTPOptions:
    """Return the options with `mtp` decided: kept where the checkpoint has the layer."""
    projection = f"model.layers.{config.num_hidden_layers}.eh_proj.weight"
    return keep_mtp_of(projection, config, options, names)


def _drops(config: DecoderConfig, options: MTPOptions) -> tuple[Drop, ...]:
    if options.mtp is not False:
        return (INV_FREQ,)
    return INV_FREQ, drop_mtp(config, "without --no-mtp")


def _n_mtp(config: DecoderConfig, options: MTPOptions) -> int | None:
    """Return how many MTP layers the file has; None, to leave the key out, where they are not kept."""
    if options.mtp is False or config.num_nextn_predict_layers is None:
        return None
    return n_mtp_layers(config, options)


ARCHITECTURE = decoder(
    "Glm4MoeForCausalLM",
    gguf_name="glm4moe",
    options=MTPOptions,
    read_config=read_config,
    rules=(
        *ends(),
        *attention(),
        in_layer(layers, "post_attention_norm.weight", "post_attention_layernorm.weight", "hidden_size"),
        *dense_blocks(),
        in_layer(moe_layers, "ffn_gate_inp.weight", "mlp.gate.weight", "num_experts hidden_size"),
        in_layer(moe_layers, "exp_probs_b.bias", "mlp.gate.e_score_correction_bias", "num_experts"),
        *expert_stacks(moe_layers),
        *shared_experts(moe_layers),
        *mtp(),
    ),
    drops=_drops,
    metadata=(
        *(key for key in COMMON if key is not GATING),
        ROTATED_COLS, EXPERT_WIDTH, SHARED_EXPERTS, DENSE_LAYERS, GATING, EXPERT_SCALE, EXPERT_NORM,
        Key(keys.NEXTN_PREDICT_LAYERS, Value.u32, _n_mtp),
    ),
    check=check_mtp,
    resolve_options=resolve_options,
    quirks=GLM,
)  # fmt: skip
