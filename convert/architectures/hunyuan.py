"""Hunyuan, dense and with experts, norms queries and keys after they are rotated; Hy V3 does so before.

Published models call their rotation "dynamic", with an `alpha`, of which a power stretches theta, whatever
the length of a text. Their config.json may say a context of 32,768 tokens where the models have 262,144.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from convert.architectures.base import Architecture, Key
from convert.architectures.config_reader import ConfigReader, merged
from convert.architectures.decoder.config import (
    DecoderConfig,
    decoder_fields,
    expert_fields,
    leading_dense_layers,
    stated_as,
    with_defaults,
)
from convert.architectures.decoder.family import decoder
from convert.architectures.decoder.metadata import (
    COMMON,
    EXPERT_NORM,
    EXPERT_SCALE,
    EXPERT_WIDTH,
    GATING,
    SHARED_EXPERTS,
    SHARED_WIDTH,
    USED_EXPERTS,
    dense_by_routers,
    read_decoder,
)
from convert.architectures.decoder.rope import RopeConfig
from convert.architectures.decoder.rules import (
    check_mtp,
    dense_decoder,
    expert_stacks,
    in_layer,
    keep_last_mtp,
    layers,
    mixture_decoder,
    moe_layers,
    mtp,
    mtp_drops,
    n_mtp_layers,
    respelled,
    shared_experts,
)
from convert.architectures.options import MTPOptions
from convert.tokenizer.files import HUNYUAN, Quirks
from gguf_tools.format import keys
from gguf_tools.format.values import Metadata, Value

_STATED_CONTEXT, _CONTEXT = 2**15, 2**18


def _fields(read: ConfigReader) -> dict[str, Any]:
    """Return the fields of DecoderConfig that both kinds have."""
    read.fixed("attention_bias", False, "llama.cpp's Hunyuan has none")
    fields = {**decoder_fields(read), "qk_norm": True}
    rope, cols, context = fields["rope"], fields["head_dim"], fields["max_position_embeddings"]
    stated = ConfigReader(read.raw.get("rope_scaling") or read.raw.get("rope_parameters") or {}, read.path)
    alpha = stated.number_or_null("alpha")
    if rope.kind != "dynamic" or not alpha:
        return fields
    if cols < 4:
        raise read.bad("head_dim", "4 or more, for a rotation that alpha stretches")
    stretched = ConfigReader({"rope_theta": rope.theta * alpha ** (cols / (cols - 2))}, read.path)
    context = _CONTEXT if context == _STATED_CONTEXT else context
    rope = RopeConfig(stretched.number("rope_theta"), "none", factor=1.0, original_context=context)
    return {**fields, "rope": rope, "max_position_embeddings": context}


def _stretched(value: Any) -> Any:
    return lambda c, o: value(c.rope) if c.rope.kind == "none" else None


_ALPHA = (
    Key(keys.ROPE_SCALING_TYPE, Value.string, _stretched(lambda rope: rope.kind)),
    Key(keys.ROPE_SCALING_FACTOR, Value.f32, _stretched(lambda rope: rope.factor)),
    Key(keys.ROPE_SCALING_ORIG_CTX_LEN, Value.u32, _stretched(lambda rope: rope.original_context)),
)
"""Keys of a model whose theta is stretched: nothing is left to be scaled."""


_canonical_name = respelled(
    (".query_layernorm.", ".q_norm."), (".key_layernorm.", ".k_norm."), (".mlp.gate.wg.", ".mlp.gate.")
)
"""Names of Hunyuan -> those that most families have."""


def _read_dense(raw: Mapping[str, Any], path: str | Path) -> DecoderConfig:
    """Return the configuration of a dense Hunyuan."""
    return DecoderConfig(**_fields(with_defaults(raw, path)))


_DENSE = decoder(
    "HunYuanDenseV1ForCausalLM",
    gguf_name="hunyuan-dense",
    read_config=_read_dense,
    rules=dense_decoder(),
    metadata=(*COMMON, *_ALPHA),
    canonical_name=_canonical_name,
    norms_rotated=True,
    quirks=Quirks(
        pre_tokenizers={"deepseek-v3": "hunyuan-dense"},
        eod=True,
        tiktoken=replace(HUNYUAN, bos="<|startoftext|>"),
    ),
)


def _read_mixture(raw: Mapping[str, Any], path: str | Path) -> DecoderConfig:
    """Return the configuration of a Hunyuan with experts."""
    read = with_defaults(raw, path)
    names = "moe_topk", "num_experts_per_tok"
    stated = {name: _of_all_layers(read, name, 1) for name in names if raw.get(name) is not None}
    used = stated.get(stated_as(stated, path, *names), 1)
    fields = {
        **_fields(read),
        **expert_fields(ConfigReader(merged(read.raw, {"num_experts_per_tok": used}), path)),
    }
    width = fields["intermediate_size"]
    if _of_all_layers(read, "moe_intermediate_size", width) != width:
        raise read.bad("moe_intermediate_size", f"intermediate_size ({width}) in every layer")
    return DecoderConfig(
        **fields,
        moe_intermediate_size=width,
        num_shared_experts=_of_all_layers(read, "num_shared_expert", 1),
        shared_expert_intermediate_size=width,
    )


def _of_all_layers(read: ConfigReader, key: str, default: int) -> int:
    """Return a size that config.json states once, or once for each layer."""
    stated = read.raw.get(key)
    if isinstance(stated, list) and stated and stated.count(stated[0]) == len(stated):
        return ConfigReader({key: stated[0]}, read.path).size(key)
    return read.size(key, default)


_MIXTURE = decoder(
    "HunYuanMoEV1ForCausalLM",
    gguf_name="hunyuan-moe",
    read_config=_read_mixture,
    rules=(*mixture_decoder(expert_stacks(layers)), *shared_experts(layers, "shared_mlp")),
    metadata=(
        *(key for key in COMMON if key is not USED_EXPERTS),
        SHARED_WIDTH, EXPERT_WIDTH, USED_EXPERTS, SHARED_EXPERTS, *_ALPHA,
    ),
    canonical_name=_canonical_name,
    norms_rotated=True,
    quirks=Quirks(pre_tokenizers={"qwen2": "hunyuan"}, tiktoken=replace(HUNYUAN, bos="<|bos|>")),
)  # fmt: skip


def _read_v3(raw: Mapping[str, Any], path: str | Path) -> DecoderConfig:
    """Return the configuration of a Hy V3."""
    read = with_defaults(raw, path)
    for key in ("attention_bias", "mlp_bias"):
        read.fixed(key, False, "llama.cpp's hy_v3 has no biases")
    fields = decoder_fields(read, theta=_V3_THETA)
    n_mtp = read.size("num_nextn_predict_layers", 0, least=0)
    return DecoderConfig(
        **fields,
        **expert_fields(read),
        qk_norm=True,
        moe_intermediate_size=read.size("moe_intermediate_size"),
        num_shared_experts=read.size("num_shared_experts", 1),
        first_k_dense_replace=leading_dense_layers(read, fields["num_hidden_layers"], 1),
        scoring_func="sigmoid",
        norm_topk_prob=read.flag("route_norm", True),
        routed_scaling_factor=read.number("router_scaling_factor", 1.0),
        num_nextn_predict_layers=n_mtp or None,
    )


_V3_THETA = 11_158_840.0
"""Base of the rotation where config.json has none, as in transformers' class."""


_v3_name = respelled(
    (".mlp.router.gate.", ".mlp.gate."),
    (".mlp.e_score_correction_bias", ".mlp.expert_bias"),
    (".mlp.shared_mlp.", ".mlp.shared_experts."),
    (".final_layernorm.", ".shared_head.norm."),
)
"""Names of Hy V3 -> those that most families have."""


def _read_v3_file(
    family: Architecture, metadata: Metadata, shapes: Mapping[str, tuple[int, ...]], path: str | Path
) -> DecoderConfig:
    """Return the configuration in a file, see `read_decoder`; the first layers have no router."""
    config = read_decoder(family, metadata, shapes, path)
    return replace(config, first_k_dense_replace=dense_by_routers(shapes, config.num_hidden_layers))


_V3 = decoder(
    "HYV3ForCausalLM",
    gguf_name="hy_v3",
    options=MTPOptions,
    read_config=_read_v3,
    rules=(
        *dense_decoder(),
        in_layer(moe_layers, "ffn_gate_inp.weight", "mlp.gate.weight", "num_experts hidden_size"),
        in_layer(moe_layers, "exp_probs_b", "mlp.expert_bias", "num_experts"),
        *expert_stacks(moe_layers),
        *shared_experts(moe_layers),
        *mtp(),
    ),
    metadata=(
        *(key for key in COMMON if key is not GATING),
        EXPERT_WIDTH, SHARED_WIDTH, EXPERT_NORM, EXPERT_SCALE, GATING,
        Key(keys.NEXTN_PREDICT_LAYERS, Value.u32, lambda c, o: n_mtp_layers(c, o) or None),
    ),
    drops=mtp_drops,
    check=check_mtp,
    resolve_options=keep_last_mtp,
    canonical_name=_v3_name,
    quirks=Quirks(pre_tokenizers={"deepseek-v3": "hunyuan-dense"}),
    unset_gating="sigmoid",
    says_norm=True,
    reader=_read_v3_file,
)  # fmt: skip


FAMILIES = (_DENSE, _MIXTURE, _V3)
