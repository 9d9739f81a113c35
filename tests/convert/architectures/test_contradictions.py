"""Fields that llama.cpp can't obey, or that contradict others, are refused by name or noted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from convert.architectures import find_architecture
from convert.architectures.config_reader import Fields, unread_notes
from convert.architectures.options import make_options
from gguf_tools.errors import BadConfig, ToolkitError
from tests.convert.architectures.test_deepseek4 import CONFIG as DEEPSEEK4
from tests.support.published_models import PUBLISHED

_SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512, "head_dim": 16,
}  # fmt: skip
_ROTATIONS = {"full_attention": {"rope_type": "proportional", "rope_theta": 1e6},
              "sliding_attention": {"rope_type": "default"}}  # fmt: skip
_HYBRID = {**_SIZES, "mamba_n_heads": 8, "num_local_experts": 0, "shared_intermediate_size": 48}
_LATENT = {**_SIZES, "num_key_value_heads": 4, "n_routed_experts": 8, "num_experts_per_tok": 2,
           "n_shared_experts": 1, "moe_intermediate_size": 32, "kv_lora_rank": 32, "q_lora_rank": 24,
           "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16, "n_group": 1,
           "topk_group": 1}  # fmt: skip

MODELS: dict[str, dict[str, Any]] = {
    "GraniteMoeHybridForCausalLM": {**_HYBRID, "layer_types": ["mamba"] * 3 + ["attention"]},
    "NemotronHForCausalLM": {**_SIZES, "hybrid_override_pattern": "M-*-"},
    "MiniMaxM2ForCausalLM": {**_SIZES, "num_local_experts": 4, "num_experts_per_tok": 2},
    "Gemma3ForCausalLM": {**_SIZES, "query_pre_attn_scalar": 16, "sliding_window": 8},
    "Gemma4ForCausalLM": {**_SIZES, "layer_types": ["sliding_attention", "full_attention"] * 2,
                          "rope_parameters": _ROTATIONS, "hidden_size_per_layer_input": 0},
    "Qwen3_5ForCausalLM": {**_SIZES, "head_dim": 32},
    "Ministral3ForCausalLM": {
        **_SIZES, "model_type": "ministral3",
        "rope_parameters": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128,
                            "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1},
    },
    "MiMoV2FlashForCausalLM": {**_SIZES, "n_routed_experts": 4, "num_experts_per_tok": 2, "v_head_dim": 16,
                               "moe_intermediate_size": 32, "sliding_window": 16,
                               "partial_rotary_factor": 0.5},
    "DeepseekV32ForCausalLM": {**_LATENT, "index_head_dim": 64},
    "DeepseekV3ForCausalLM": _LATENT,
    "DeepseekV4ForCausalLM": DEEPSEEK4,
}  # fmt: skip


def read(name: str, **changes: Any) -> Any:
    raw = {"architectures": [name], **MODELS[name], **changes}
    return find_architecture(raw).read_config(raw, Path("config.json"))


def notes(name: str, **changes: Any) -> str:
    raw = Fields({"architectures": [name], **MODELS[name], **changes})
    family = find_architecture(raw)
    config = family.read_config(raw, Path("config.json"))
    told = family.notes(config, make_options(family.options, {}, name))
    return "\n".join((*told, *unread_notes(raw)))


@pytest.mark.parametrize(
    ("name", "changes", "told"),
    [
        ("GraniteMoeHybridForCausalLM", {"layer_types": ["mamba"] * 4}, "layer_types has no layer of attent"),
        ("NemotronHForCausalLM", {"hybrid_override_pattern": "M-M-"}, "pattern has no layer of attention"),
        ("NemotronHForCausalLM", {"hybrid_override_pattern": "*-*-"}, "no layer of Mamba 2"),
        ("Qwen3_5ForCausalLM", {"layer_types": ["full_attention"] * 4}, "no layer of linear_attention"),
        ("Qwen3_5ForCausalLM", {"head_dim": 16}, "head_dim is 16, expected 32 at least"),
        ("MiniMaxM2ForCausalLM", {"rotary_dim": 8, "partial_rotary_factor": 0.25}, "rotary_dim is 8"),
        ("MiniMaxM2ForCausalLM", {"rotary_dim": 32}, "rotary_dim is 32"),
        (
            "Gemma3ForCausalLM",
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.5}},
            "attention_factor",
        ),
        ("Gemma4ForCausalLM", {"rope_theta": 1e3}, "rope_theta is 1000"),
        ("Gemma4ForCausalLM", {"num_kv_shared_layers": 1}, "num_kv_shared_layers is 1"),
        ("Gemma4ForCausalLM", {"per_layer_config": {"1": {"head_dim": 32}}}, "per_layer_config"),
        (
            "Gemma4ForCausalLM",
            {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 128},
            "vocab_size_per_layer_input is 128",
        ),
        ("MiMoV2FlashForCausalLM", {"layer_types": ["full_attention"] * 4}, "a layer with a window"),
        (
            "MiMoV2FlashForCausalLM",
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.5}},
            "attention_factor, or mscale, 1.5",
        ),
        ("DeepseekV32ForCausalLM", {"index_head_dim": 96}, "index_head_dim is 96"),
        ("DeepseekV3ForCausalLM", {"rope_interleave": None}, "rope_interleave is None"),
        ("DeepseekV4ForCausalLM", {"hc_mult": 2}, "hc_mult is 2"),
        ("DeepseekV4ForCausalLM", {"scoring_func": "sigmoid"}, "scoring_func is 'sigmoid'"),
        ("DeepseekV4ForCausalLM", {"compress_ratios": [0, 0, 128, 128]}, "compress_ratios"),
        ("DeepseekV4ForCausalLM", {"compress_rate_hca": 64}, "compress_rate_hca is 64"),
        ("DeepseekV4ForCausalLM", {"mlp_layer_types": ["moe", "hash_moe"] * 2}, "mlp_layer_types"),
        ("DeepseekV4ForCausalLM", {"original_max_position_embeddings": 64}, "original_max_position_embed"),
    ],
)
def test_what_llama_cpp_can_not_obey_is_refused(name: str, changes: dict[str, Any], told: str) -> None:
    read(name)
    with pytest.raises(ToolkitError) as refused:
        read(name, **changes)
    assert told in str(refused.value)


@pytest.mark.parametrize(
    ("name", "changes", "told"),
    [
        ("NemotronHForCausalLM", {"time_step_min": 0.01}, "time_step_min is 0.01, not 0.001"),
        ("Qwen3_5ForCausalLM", {"rms_norm_eps": 1e-5}, "rms_norm_eps is 1e-05"),
        ("MiMoV2FlashForCausalLM", {"sliding_window_size": 40}, "see 41 positions; the file says 16"),
        (
            "DeepseekV4ForCausalLM",
            {"rope_scaling": {**DEEPSEEK4["rope_scaling"], "beta_slow": 2}},
            "--yarn-beta-slow 2",
        ),
    ],
)
def test_what_llama_cpp_computes_otherwise_is_noted(name: str, changes: dict[str, Any], told: str) -> None:
    assert told not in notes(name)
    assert told in notes(name, **changes)


def test_one_of_two_fields_rules_as_in_transformers() -> None:
    kinds = {"layer_types": None, "layers_block_type": ["mamba", "attention"] * 2}
    assert read("GraniteMoeHybridForCausalLM", **kinds).mamba_layers == (0, 2)
    assert read("GraniteMoeHybridForCausalLM").intermediate_size == 48
    assert read("MiniMaxM2ForCausalLM").rotated_cols == 16
    assert read("MiniMaxM2ForCausalLM", rotary_dim=8).rotated_cols == 8
    sparse = {"mlp_layer_types": ["dense", *["sparse"] * 3], "first_k_dense_replace": 3}
    assert read("DeepseekV32ForCausalLM", **sparse).first_k_dense_replace == 1
    assert read("DeepseekV4ForCausalLM", mlp_layer_types=["moe"] * 4).num_hash_layers == 0
    by_layer = {key: {"head_dim": 32, "num_key_value_heads": 1} for key in ("1", "3")}
    config = read("Gemma4ForCausalLM", per_layer_config=by_layer)
    assert (config.global_head_dim, config.global_kv_heads) == (32, 1)
    ends = read("Gemma4ForCausalLM", layer_types=["sliding_attention"] * 4)
    assert ends.sliding_layers == (0, 1, 2), "transformers makes the last layer a full one"


def test_null_of_a_flag_is_false() -> None:
    assert not read("DeepseekV3ForCausalLM", norm_topk_prob=None).norm_topk_prob
    assert read("DeepseekV3ForCausalLM").norm_topk_prob


@pytest.mark.parametrize(
    "stated", [3, "x", [1], {"full_attention": 3}, {"full_attention": {}, "sliding_attention": 3}]
)
def test_rotations_of_two_kinds_are_objects(stated: Any) -> None:
    gemmas = (
        {"architectures": [name], **MODELS[name]} for name in ("Gemma3ForCausalLM", "Gemma4ForCausalLM")
    )
    for config in (*gemmas, PUBLISHED["step-3.5"].config):
        raw = {**config, "rope_parameters": stated}
        with pytest.raises(BadConfig, match=r"rope_parameters is .*, expected an object for full_attention"):
            find_architecture(raw).read_config(raw, Path("config.json"))
