"""config.json in both spellings, its silences, and what it may not say."""

from __future__ import annotations

import math
from typing import Any

import pytest

from convert.architectures.decoder.rope import Yarn
from convert.architectures.deepseek2.config import V2, V3, DeepseekConfig
from gguf_tools.errors import BadConfig, UnsupportedCheckpoint
from tests.support.checkpoints import STYLES

YARN = Yarn(40.0, 64, 32.0, 1.0, 0.707, 0.707, None)


def read(style: str = "v3", **changes: Any) -> DeepseekConfig:
    return DeepseekConfig.from_dict(STYLES[style] | changes, "folder/config.json")


def without(style: str, *keys: str) -> dict[str, Any]:
    return {key: value for key, value in STYLES[style].items() if key not in keys}


def test_both_spellings_of_rope_say_the_same() -> None:
    parameters = dict(STYLES["v2"]["rope_parameters"])
    newer = read("v2")
    older = {**parameters, "type": parameters.pop("rope_type")}
    older.pop("rope_type")
    theta = older.pop("rope_theta")
    raw = without("v2", "rope_parameters") | {"rope_scaling": older, "rope_theta": theta}
    assert DeepseekConfig.from_dict(raw) == newer
    assert newer.yarn == YARN


def test_plain_rope_in_both_spellings() -> None:
    raw = without("v3", "rope_parameters") | {"rope_scaling": None, "rope_theta": 10000}
    assert DeepseekConfig.from_dict(raw) == read("v3")
    assert read("v3").yarn is None


def test_rope_scaling_wins_as_in_transformers() -> None:
    config = read(
        "v2", rope_scaling={"type": "yarn", "factor": 2.0, "mscale": 1, "mscale_all_dim": 1}, rope_theta=5.0
    )
    assert config.yarn is not None
    assert (config.yarn.factor, config.rope.theta) == (2.0, 5.0)
    # Silent about the length before: the length of now.
    assert config.yarn.original_context == config.max_position_embeddings


def test_rope_theta_defaults_to_ten_thousand() -> None:
    assert DeepseekConfig.from_dict(without("v3", "rope_parameters")).rope.theta == 10000.0


@pytest.mark.parametrize(
    ("mscale", "all_dim", "attention", "factor"),
    [
        (0.707, 0.707, None, 1.0),
        (1.0, 0.5, None, (1 + 0.1 * math.log(40)) / (1 + 0.05 * math.log(40))),
        (None, None, None, 1 + 0.1 * math.log(40)),
        (1.0, 0.0, None, 1 + 0.1 * math.log(40)),
        (1.0, 1.0, 1.25, 1.25),
    ],
)
def test_rotary_factor_is_transformers(mscale: Any, all_dim: Any, attention: Any, factor: float) -> None:
    assert Yarn(40.0, 64, 32, 1, mscale, all_dim, attention).rotary_factor == pytest.approx(factor)


def test_v3_fills_silences_as_transformers_computes() -> None:
    keys = ("scoring_func", "topk_method", "norm_topk_prob", "routed_scaling_factor", "n_group", "topk_group",
            "first_k_dense_replace", "rms_norm_eps", "tie_word_embeddings",
            "num_nextn_predict_layers")  # fmt: skip
    config = DeepseekConfig.from_dict(without("v3", *keys) | {"n_routed_experts": 16})
    assert config.architecture == V3
    assert (config.scoring_func, config.topk_method, config.norm_topk_prob) == ("sigmoid", "noaux_tc", True)
    assert (config.routed_scaling_factor, config.n_group, config.topk_group) == (2.5, 8, 4)
    assert (config.first_k_dense_replace, config.rms_norm_eps, config.tie_word_embeddings) == (3, 1e-6, False)
    assert config.num_nextn_predict_layers == 0


def test_v2_fills_silences_as_transformers_computes() -> None:
    keys = ("scoring_func", "topk_method", "norm_topk_prob", "routed_scaling_factor", "n_group", "topk_group",
            "first_k_dense_replace")  # fmt: skip
    config = DeepseekConfig.from_dict(without("v2", *keys))
    assert config.architecture == V2
    assert (config.scoring_func, config.topk_method, config.norm_topk_prob) == ("softmax", "greedy", False)
    assert (config.routed_scaling_factor, config.n_group, config.topk_group) == (1.0, None, None)
    assert (config.first_k_dense_replace, config.expert_groups) == (0, None)


def test_the_defaults_are_those_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    v2, v3 = transformers.DeepseekV2Config(), transformers.DeepseekV3Config()
    silent = ("norm_topk_prob", "routed_scaling_factor", "n_group", "topk_group", "first_k_dense_replace",
              "rms_norm_eps", "tie_word_embeddings")  # fmt: skip
    for style, theirs in (("v2", v2), ("v3", v3)):
        ours = DeepseekConfig.from_dict(without(style, *silent) | {"n_routed_experts": 16})
        for key in silent:
            assert getattr(ours, key) == getattr(theirs, key), (style, key)
    assert v2.topk_method == "greedy"


def test_v2_never_normalises() -> None:
    config = read("v2", norm_topk_prob=True)
    assert not config.norm_topk_prob
    assert config.norm_requested


def test_the_other_name_of_the_mtp_count_is_read() -> None:
    raw = without("v3", "num_nextn_predict_layers") | {"num_mtp_layers": 2}
    assert DeepseekConfig.from_dict(raw).num_nextn_predict_layers == 2


def test_sizes_of_deepseek_v3() -> None:
    config = read(
        num_attention_heads=128, num_key_value_heads=128, qk_nope_head_dim=128, qk_rope_head_dim=64,
        v_head_dim=128, kv_lora_rank=512, moe_intermediate_size=2048, hidden_size=7168,
    )  # fmt: skip
    assert (config.head_dim, config.q_rows, config.kv_a_rows, config.kv_b_rows) == (192, 24576, 576, 32768)
    assert (config.attention_cols, config.shared_intermediate_size, config.concat_size) == (
        16384,
        2048,
        14336,
    )


@pytest.mark.parametrize(
    "key",
    ["vocab_size", "hidden_size", "intermediate_size", "moe_intermediate_size", "num_hidden_layers",
     "num_attention_heads", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim",
     "v_head_dim", "n_routed_experts", "n_shared_experts", "num_experts_per_tok", "max_position_embeddings"],
)  # fmt: skip
def test_a_missing_size_names_file_and_key(key: str) -> None:
    with pytest.raises(BadConfig, match=rf"^folder/config\.json: no {key}, expected a whole number"):
        DeepseekConfig.from_dict(without("v3", key), "folder/config.json")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_size": 0}, "hidden_size is 0, expected a whole number from 1"),
        ({"hidden_size": "96"}, "hidden_size is '96'"),
        ({"hidden_size": 96.0}, "hidden_size is 96.0"),
        ({"hidden_size": True}, "hidden_size is True"),
        ({"num_hidden_layers": 10**9}, "expected a whole number from 1 to 512"),
        ({"n_routed_experts": 10**9}, "expected a whole number from 1 to 1024"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok is 9, expected a whole number from 1 to 8"),
        ({"num_key_value_heads": 2}, r"num_key_value_heads is 2, expected 4 \(num_attention_heads\)"),
        ({"n_group": 3}, "n_group is 3, expected a divisor of n_routed_experts"),
        ({"n_group": 8}, "n_group is 8, expected a divisor .* with 2 or more experts a group"),
        ({"topk_group": 5}, r"topk_group is 5, expected 1 to n_group \(4\)"),
        ({"scoring_func": "softmax"}, "scoring_func is 'softmax', expected 'sigmoid'"),
        ({"topk_method": "greedy"}, "topk_method is 'greedy', expected 'noaux_tc'"),
        ({"norm_topk_prob": 1}, "norm_topk_prob is 1, expected true or false"),
        ({"rms_norm_eps": 0}, "rms_norm_eps is 0, expected a positive number"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
        ({"routed_scaling_factor": 10**400}, "routed_scaling_factor is 1000"),
        ({"rope_parameters": {"rope_type": "yarn"}}, r"no rope_parameters\.factor, expected"),
        ({"rope_parameters": [1]}, r"rope_parameters is \[1\], expected an object"),
        ({"architectures": ["LlamaForCausalLM"]}, "architectures is .*expected a list beginning with"),
    ],
)  # fmt: skip
def test_a_senseless_value_names_file_key_and_expectation(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(BadConfig, match=words) as caught:
        read("v3", **changes)
    assert str(caught.value).startswith("folder/config.json: ")
    assert "\n" not in str(caught.value)


def test_v2_knows_its_own_methods_only() -> None:
    with pytest.raises(BadConfig, match="expected 'greedy' or 'group_limited_greedy'"):
        read("v2", topk_method="noaux_tc")
    with pytest.raises(BadConfig, match="expected 'softmax'"):
        read("v2", scoring_func="sigmoid")


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_act": "gelu"},
        {"attention_bias": True},
        {"mlp_bias": True},
        {"rope_interleave": False},
        {"moe_layer_freq": 2},
        {"partial_rotary_factor": 0.5},
        {"rope_parameters": {"rope_type": "llama3", "factor": 8.0}},
        {"rope_scaling": {"type": "linear", "factor": 2.0}},
    ],
)
def test_what_llama_cpp_does_not_compute_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedCheckpoint, match=r"^folder/config\.json: .*expected"):
        read("v3", **changes)
