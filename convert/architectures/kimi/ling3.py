"""Ling and Ring 3 (Bailing MoE V3): groups of layers of KDA that end with one of latent attention.

What they have besides Kimi Linear (facts of llama.cpp's converter, BailingMoeV3Model, and of transformers'
modeling_bailing_hybrid.py):

    ssm_f_a, ssm_g_a  one matrix for the rate of KDA, and one for its gate
    ssm_a             exp(A_log): the rate is kda_lower_bound * sigmoid(ssm_a * rate)
    attn_gate         a row for each head of latent attention, which rotates, before its output matrix
    swiglu_clamp_*    limits of SiLU(gate) and up, layer by layer
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from convert.architectures.base import Architecture, Key
from convert.architectures.config_reader import merged
from convert.architectures.decoder.config import (
    FULL,
    layers_of_kind,
    read_limits,
    refuse_one_kind,
    stated_as,
    with_defaults,
)
from convert.architectures.decoder.metadata import (
    EXPERT_NORM,
    LIMITS,
    SHARED_WIDTH,
    changed,
    inserted,
    limits_of_file,
    refuse_sections,
)
from convert.architectures.decoder.rules import (
    check_mtp,
    ends,
    expert_stacks,
    in_layer,
    keep_last_mtp,
    moe_layers,
    mtp_drops,
    mtp_layers,
    respelled,
)
from convert.architectures.deepseek2.config import Defaults, deepseek_fields
from convert.architectures.delta_net.config import LINEAR
from convert.architectures.kimi.linear import (
    COMMON_RULES,
    GROUPS,
    OF_EXPERTS,
    KimiConfig,
    eps_notes,
    kimi,
    kimi_delta,
    kimi_keys,
    latent_layers,
    linear_layers,
    read_bound,
    read_kimi_file,
    with_deepseek_names,
)
from convert.architectures.options import MTPOptions
from convert.architectures.rules import Renamed, Rule
from convert.tokenizer.files import Quirks
from convert.weights.base import Weight
from gguf_tools.errors import FormatError
from gguf_tools.format import keys
from gguf_tools.format.ggml_types import F32
from gguf_tools.format.hparams import read_hparams
from gguf_tools.format.values import Metadata, Value

_CLASS = "BailingHybridForCausalLM"


# ---- config.json

_FIXED: Mapping[str, Any] = {
    "no_kda_lora": True, "kda_safe_gate": True, "gated_attention_proj_granularity_type": "head_wise",
    "use_bias": False, "use_qkv_bias": False, "use_rmsnorm": True, "moe_router_enable_expert_bias": True,
    "use_sliding_window": False,
}  # fmt: skip


_MTP_NAMES = "num_nextn_predict_layers", "num_mtp_layers"


def _read(raw: Mapping[str, Any], path: str | Path) -> KimiConfig:
    named, mtp = with_deepseek_names(raw, path), stated_as(raw, path, *_MTP_NAMES)
    # The class has a default under one name. What is rotated is qk_rope_head_dim, whatever the part.
    stated = {"num_mtp_layers": raw[mtp]} if mtp in raw else {}
    named = merged(named, {**stated, "partial_rotary_factor": None})
    read = with_defaults(named, path, name=_CLASS)
    for key, value in _FIXED.items():
        read.fixed(key, value, "llama.cpp's bailingmoe3 has no other")
    read.overruled("sliding_window", "max_window_layers", "router_dtype", "use_qk_norm")
    fields = deepseek_fields(read, dict.fromkeys(_LING3.hf_names, Defaults(dense=2)))
    if fields["rope"].kind != "default":
        raise read.bad("rope_scaling", "null: llama.cpp doesn't sharpen scores of this architecture")
    n_layers, heads = fields["num_hidden_layers"], fields["num_attention_heads"]
    read.fixed("linear_num_heads", heads, "llama.cpp has as many heads in all layers")
    group = read.size("layer_group_size")
    in_groups = n_layers // group * group
    linear = layers_of_kind(
        read, n_layers, lambda layer: layer < in_groups and (layer + 1) % group > 0, LINEAR
    )
    refuse_one_kind(read, "layer_types", {LINEAR: len(linear), FULL: n_layers - len(linear)})
    bound = read_bound(read, "kda_lower_bound")
    if bound is None:
        raise read.bad("kda_lower_bound", "a number below 0")
    shared = fields["num_shared_experts"] * fields["moe_intermediate_size"]
    return KimiConfig(
        **fields | {"lengths_first": True},
        shared_expert_intermediate_size=read.size("moe_shared_expert_intermediate_size", shared),
        linear_layers=linear,
        # transformers saves the size of rotated columns as head_dim, and this beside it.
        linear_head_dim=read.size("linear_head_dim", read.size("head_dim")),
        linear_conv_kernel_dim=read.size(
            "linear_conv_kernel_dim", read.size("short_conv_kernel_size"), least=2
        ),
        gate_lower_bound=bound,
        expert_limits=read_limits(read, "expert_swiglu_limit_list"),
        block_limits=read_limits(read, "share_expert_swiglu_limit_list"),
    )


def read_ling3_file(
    family: Architecture, metadata: Metadata, shapes: Mapping[str, tuple[int, ...]], path: str | Path
) -> KimiConfig:
    """Read the configuration out of the keys and tensors of a GGUF file; see `read_decoder`."""
    config = read_kimi_file(family, metadata, shapes, path)
    hparams = read_hparams(metadata, family.gguf_name, path)
    refuse_sections(hparams)
    if hparams.kda_safe_gate is False or config.gate_lower_bound is None or not config.gate_lower_bound < 0:
        raise FormatError(
            f"{path}: {hparams.key('kda_gate_lower_bound')} is {config.gate_lower_bound},"
            f" {hparams.key('kda_safe_gate')} {hparams.kda_safe_gate}, expected a bound below 0 that holds"
        )

    return replace(config, **limits_of_file(hparams, config.num_hidden_layers))


# ---- rules


@dataclass(frozen=True, eq=False)
class Powers(Renamed):
    """Powers of e with the numbers of a vector for exponents, a row for each, float32.

    They are rounded once: programs' own exponentials of float32 differ.
    """

    def read_rows(self, start: int, stop: int) -> np.ndarray:
        exponents = super().read_rows(0, 1).reshape(-1, 1)[start:stop]
        return np.exp(exponents.astype(np.float64)).astype(np.float32)


def _powers(name: str, weights: Sequence[Weight], config: KimiConfig) -> Powers:
    (weight,) = weights
    return Powers(name, (*weight.shape, 1), F32, weight)


_RULES: tuple[Rule, ...] = (
    *ends(),
    *COMMON_RULES,
    *kimi_delta("num_attention_heads", _powers),
    in_layer(linear_layers, "ssm_f_a.weight", "self_attn.f_proj.weight", "linear_rows hidden_size"),
    in_layer(linear_layers, "ssm_g_a.weight", "self_attn.g_proj.weight", "linear_rows hidden_size"),
    in_layer(latent_layers, "attn_gate.weight", "self_attn.g_proj.weight", "num_attention_heads hidden_size"),
    *expert_stacks(moe_layers),
    in_layer(mtp_layers, "nextn.eh_proj.weight", "eh_proj.weight", "hidden_size concat_size"),
    in_layer(mtp_layers, "nextn.enorm.weight", "enorm.weight", "hidden_size"),
    in_layer(mtp_layers, "nextn.hnorm.weight", "hnorm.weight", "hidden_size"),
    in_layer(mtp_layers, "layer_output_norm.weight", "final_layernorm.weight", "hidden_size"),
)

_usual_name = respelled(
    ("model.word_embeddings.", "model.embed_tokens."),
    (".attention.dense.", ".self_attn.o_proj."),
    (".attention.", ".self_attn."),
    (".mlp.gate.expert_bias", ".mlp.gate.e_score_correction_bias"),
)
"""Names of Bailing MoE V3 -> those that most families have."""


# ---- keys


_BOUNDED = Key(keys.KDA_SAFE_GATE, Value.bool_, lambda c, o: True)

_METADATA: tuple[Key, ...] = (
    *changed(kimi_keys(lambda c: c.linear_head_dim, _BOUNDED), *GROUPS),
    *inserted(OF_EXPERTS, SHARED_WIDTH, after=keys.EXPERT_FEED_FORWARD_LENGTH),
    EXPERT_NORM,
    *LIMITS,
    Key(keys.NEXTN_PREDICT_LAYERS, Value.u32, lambda c, o: len(mtp_layers(c, o)) or None),
)

_LING3 = kimi(
    "BailingMoeV3ForCausalLM",
    _CLASS,
    gguf_name="bailingmoe3",
    options=MTPOptions,
    check=check_mtp,
    resolve_options=keep_last_mtp,
    read_config=_read,
    rules=_RULES,
    metadata=_METADATA,
    drops=mtp_drops,
    notes=eps_notes,
    canonical_name=_usual_name,
    quirks=Quirks(),
    says_norm=True,
    reader=read_ling3_file,
)

FAMILIES = (_LING3,)
