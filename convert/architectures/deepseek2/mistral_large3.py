"""Mistral Large 3 in Mistral's own format, as `deepseek2`: DeepSeek's latent attention under other names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from convert.architectures.base import Key
from convert.architectures.config_reader import ConfigReader
from convert.architectures.deepseek2.config import DeepseekConfig, Defaults, deepseek_fields
from convert.architectures.deepseek2.family import relative
from convert.architectures.deepseek2.metadata import METADATA as DEEPSEEK_METADATA
from convert.checkpoint.checkpoint import MISTRAL_LARGE_3
from gguf_tools.errors import BadConfig
from gguf_tools.format import keys
from gguf_tools.format.values import Value
from gguf_tools.text import quoted

_CONTEXT = 128_000
"""max_position_embeddings where params.json has none, as llama.cpp's converter takes it."""

_SIZES: Mapping[str, str] = {
    "dim": "hidden_size", "n_layers": "num_hidden_layers", "n_heads": "num_attention_heads",
    "hidden_dim": "intermediate_size",
}  # fmt: skip
_MOE_SIZES: Mapping[str, str] = {
    "num_experts": "n_routed_experts", "num_experts_per_tok": "num_experts_per_tok",
    "expert_hidden_dim": "moe_intermediate_size", "num_shared_experts": "n_shared_experts",
}  # fmt: skip
"""Mistral's names of sizes -> DeepSeek's."""

_SAME = ("architectures", "vocab_size", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim",
         "v_head_dim", "rope_theta", "head_dim")  # fmt: skip


_DEFAULTS = Defaults(("softmax",), ("greedy", "group_limited_greedy"), scale=1.0, groups=(1, 1), dense=0)


def _read_params(
    raw: Mapping[str, Any], path: str | Path, defaults_of: Mapping[str, Defaults]
) -> DeepseekConfig:
    """Return the configuration in `raw`, the content of `path`: params.json.

    raises  BadConfig naming file and key, under Mistral's names where they differ; UnsupportedCheckpoint
    """
    read = ConfigReader(raw, path)
    of_moe = ConfigReader(_inner(raw, path, "moe"), path, prefix="moe.")
    n_groups = of_moe.size("num_expert_groups", 1)
    fields = deepseek_fields(ConfigReader({
        **{key: raw[key] for key in _SAME if key in raw},
        **{theirs: read.size(ours) for ours, theirs in _SIZES.items()},
        **{theirs: of_moe.size(ours) for ours, theirs in _MOE_SIZES.items()},
        "first_k_dense_replace": of_moe.size("first_k_dense_replace", 0, least=0),
        "moe_layer_freq": of_moe.size("route_every_n", 1),
        "routed_scaling_factor": of_moe.number("routed_scale", 1.0),
        "n_group": n_groups,
        "topk_group": of_moe.size("num_expert_groups_per_tok", 1),
        "topk_method": "group_limited_greedy" if n_groups > 1 else "greedy",
        "norm_topk_prob": True,
        "rms_norm_eps": read.number("norm_eps", 1e-6),
        "max_position_embeddings": read.size("max_position_embeddings", _CONTEXT),
        "hidden_act": raw.get("activation", "silu"),
        "tie_word_embeddings": read.flag("tied_embeddings", False),
        "rope_scaling": _rope_scaling(raw, path),
    }, path), defaults_of)  # fmt: skip
    scaling = ConfigReader(_inner(raw, path, "llama_4_scaling"), path, prefix="llama_4_scaling.")
    if raw.get("llama_4_scaling"):
        yarn = fields["rope"].yarn
        length = yarn.original_context if yarn else fields["max_position_embeddings"]
        fields["sharpness"] = scaling.number("beta"), length
    return DeepseekConfig(**fields)


def _inner(raw: Mapping[str, Any], path: str | Path, key: str) -> Mapping[str, Any]:
    """Return an object inside params.json, an empty one where there is none."""
    value = raw.get(key) or {}
    if not isinstance(value, Mapping):
        raise BadConfig(f"{path}: {key} is {quoted(value)}, expected an object")
    return value


def _rope_scaling(raw: Mapping[str, Any], path: str | Path) -> dict[str, Any] | None:
    """Return `yarn` as rope_scaling has it; a type of scaling in rope_scaling itself is read too."""
    if raw.get("rope_scaling"):
        return dict(_inner(raw, path, "rope_scaling"))
    if not raw.get("yarn"):
        return None
    yarn = ConfigReader(_inner(raw, path, "yarn"), path, prefix="yarn.")
    return {
        "rope_type": "yarn",
        "factor": yarn.number("factor"),
        "original_max_position_embeddings": yarn.size("original_max_position_embeddings"),
        "beta_fast": yarn.number("beta", 32.0),
        "beta_slow": yarn.number("alpha", 1.0),
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    }


_ENDS: Mapping[str, str] = {
    "tok_embeddings.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_IN_LAYER: Mapping[str, str] = {
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attention.wq": "self_attn.q_proj",
    "attention.wq_a": "self_attn.q_a_proj",
    "attention.q_a_norm": "self_attn.q_a_layernorm",
    "attention.wq_b": "self_attn.q_b_proj",
    "attention.wkv_a_with_mqa": "self_attn.kv_a_proj_with_mqa",
    "attention.kv_a_norm": "self_attn.kv_a_layernorm",
    "attention.wkv_b": "self_attn.kv_b_proj",
    "attention.wo": "self_attn.o_proj",
    "gate": "mlp.gate",
}
_BLOCKS: Mapping[str, str] = {"feed_forward": "mlp", "shared_experts": "mlp.shared_experts"}
_PROJECTIONS: Mapping[str, str] = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
_LAYER = re.compile(r"layers\.(\d+)\.(.+)\.weight")
_BLOCK = re.compile(r"(?:experts\.(?P<expert>\d+)|(?P<block>\w+))\.(?P<part>w[123])")


def canonical_name(name: str) -> str:
    """Return DeepSeek's name of a weight; a name that Mistral Large 3 doesn't have stays as it is."""
    layer = _LAYER.fullmatch(name)
    if layer is None:
        return _ENDS.get(name, name)
    inner = _IN_LAYER.get(layer[2])
    block = _BLOCK.fullmatch(layer[2])
    if block is not None:
        expert, part = block["expert"], _PROJECTIONS[block["part"]]
        place = f"mlp.experts.{expert}" if expert is not None else _BLOCKS.get(block["block"])
        inner = place and f"{place}.{part}"
    return name if inner is None else f"model.layers.{layer[1]}.{inner}.weight"


_YARN = (
    keys.ROPE_SCALING_TYPE,
    keys.ROPE_SCALING_FACTOR,
    keys.ROPE_SCALING_YARN_BETA_FAST,
    keys.ROPE_SCALING_YARN_BETA_SLOW,
    keys.ROPE_SCALING_YARN_LOG_MUL,
    keys.ROPE_SCALING_ORIG_CTX_LEN,
)

METADATA: tuple[Key, ...] = (
    *(key for key in DEEPSEEK_METADATA if key.name not in _YARN),
    *(next(key for key in DEEPSEEK_METADATA if key.name == name) for name in _YARN),
    Key(keys.TEMPERATURE_SCALE, Value.f32, lambda c, o: c.sharpness and c.sharpness[0]),
    Key(keys.TEMPERATURE_LENGTH, Value.u32, lambda c, o: c.yarn and c.yarn.original_context),
)


_VISION = ("vision_encoder.", "vision_language_adapter.", "patch_merger.", "pre_mm_projector_norm.")

_MISTRAL_LARGE_3 = relative(
    MISTRAL_LARGE_3,
    defaults=_DEFAULTS,
    read=_read_params,
    metadata=METADATA,
    canonical_name=canonical_name,
    is_vision=lambda name: name.startswith(_VISION) or "mm_projector" in name,
)

FAMILIES = (_MISTRAL_LARGE_3,)
