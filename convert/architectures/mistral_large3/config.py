"""MistralConfig: what params.json says about Mistral Large 3, checked, as a DeepSeek configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from convert.architectures.config_reader import ConfigReader
from convert.architectures.deepseek2.config import DeepseekConfig
from gguf_tools.errors import BadConfig

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


@dataclass(frozen=True)
class MistralConfig(DeepseekConfig):
    """DeepSeek's configuration, and how attention grows sharper with the position.

    temperature_scale   scores of position p are multiplied by 1 + scale * ln(1 + floor(p / length)); None for
                        a model that doesn't do so
    temperature_length  None without YaRN
    """

    temperature_scale: float | None = None
    temperature_length: int | None = None

    @property
    def sharpness(self) -> tuple[float, int] | None:
        """What DeepseekConfig says."""
        if self.temperature_scale is None:
            return None
        return self.temperature_scale, self.temperature_length or self.max_position_embeddings

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], path: str | Path = "params.json") -> MistralConfig:
        """Return the configuration in `raw`, the content of `path`.

        raises  BadConfig naming file and key, under Mistral's names where they differ; UnsupportedCheckpoint
        """
        read, moe = ConfigReader(raw, path), _inner(raw, path, "moe")
        of_moe = ConfigReader(moe, path, prefix="moe.")
        n_groups = of_moe.size("num_expert_groups", 1)
        base = DeepseekConfig.from_dict({
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
        }, path)  # fmt: skip
        scaling = ConfigReader(_inner(raw, path, "llama_4_scaling"), path, prefix="llama_4_scaling.")
        return cls(
            **{field.name: getattr(base, field.name) for field in fields(base)},
            temperature_scale=scaling.number("beta") if raw.get("llama_4_scaling") else None,
            temperature_length=base.yarn.original_context if base.yarn else None,
        )


def _inner(raw: Mapping[str, Any], path: str | Path, key: str) -> Mapping[str, Any]:
    """Return an object inside params.json, an empty one where there is none."""
    value = raw.get(key) or {}
    if not isinstance(value, Mapping):
        raise BadConfig(f"{path}: {key} is {str(value)[:80]!r}, expected an object")
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
