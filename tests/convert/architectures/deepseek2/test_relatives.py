"""Models that are DeepSeek V3 with other keys: Kimi, Moonlight, GigaChat3, Kanana-2, Youtu, GLM-4.7-Flash."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from convert.architectures import find_architecture
from convert.architectures.base import Conversion, build
from convert.architectures.deepseek2.config import DeepseekConfig
from convert.checkpoint.checkpoint import Checkpoint
from convert.weights import open_weights
from gguf_tools.errors import BadConfig
from tests.support.checkpoints import STYLES, edit_config, edit_tensors, micro_checkpoint


def converted(folder: Path, **options: Any) -> Conversion:
    checkpoint = Checkpoint(folder)
    return build(find_architecture(checkpoint.config), open_weights(checkpoint), options)


def keys(conversion: Conversion) -> dict[str, Any]:
    return {key.partition(".")[2]: value.data for key, value in conversion.metadata.items()}


def config_of(raw: Mapping[str, Any]) -> DeepseekConfig:
    """Return the configuration as the family that config.json names reads it."""
    config: DeepseekConfig = find_architecture(raw).read_config(raw, Path("config.json"))
    return config


def read(**changes: Any) -> DeepseekConfig:
    return config_of(STYLES["v3"] | changes)


def test_a_model_without_q_lora_like_moonlight_and_gigachat(tmp_path: Path) -> None:
    changes = {"q_lora_rank": None, "num_hidden_layers": 26, "n_group": 1, "topk_group": 1}
    conversion = converted(micro_checkpoint(tmp_path, "v3", **changes))
    assert "attention.q_lora_rank" not in keys(conversion)
    assert {"blk.0.attn_q.weight"} <= {tensor.name for tensor in conversion.tensors}
    assert not [note for note in conversion.notes if "llama.cpp loads" in note]


def test_kanana_s_48_layers_load_with_its_vocabulary_only() -> None:
    for vocab_size, loads in ((128256, True), (320, False)):
        config = read(q_lora_rank=None, num_hidden_layers=48, vocab_size=vocab_size)
        notes = find_architecture(STYLES["v3"]).notes(config, None)
        assert ([note for note in notes if "llama.cpp loads" in note] == []) is loads


@pytest.mark.parametrize(("slow", "flags"), [(1, ""), (2, " --yarn-beta-slow 2")])
def test_yarn_bounds_that_llama_cpp_ignores_are_noted(slow: float, flags: str) -> None:
    yarn = {
        "type": "yarn",
        "factor": 32,
        "beta_fast": 1.0,
        "beta_slow": slow,
        "mscale": 1,
        "mscale_all_dim": 1,
    }
    notes = find_architecture(STYLES["v3"]).notes(read(rope_scaling=yarn), None)
    assert [note for note in notes if note.endswith(f"run it with --yarn-beta-fast 1{flags}")]
    plain = yarn | {"beta_fast": 32, "beta_slow": 1}
    assert find_architecture(STYLES["v3"]).notes(read(rope_scaling=plain), None) == ()


def test_key_lengths_stand_where_llama_cpp_s_converter_puts_them(tmp_path: Path) -> None:
    folder = micro_checkpoint(tmp_path, "v3")
    known = list(keys(converted(folder)))
    assert known[known.index("expert_gating_func") + 1] == "attention.key_length"
    kimi = list(keys(converted(edit_config(folder, model_type="kimi_k2"))))
    assert kimi[kimi.index("attention.kv_lora_rank") + 1] == "attention.key_length"


def dense(folder: Path) -> Path:
    """Return a Youtu checkpoint: a V3 whose layers are all dense, without any key about experts."""
    micro_checkpoint(folder, "v3", first_k_dense_replace=3)
    drop = ("n_routed_experts", "n_shared_experts", "num_experts_per_tok", "moe_intermediate_size", "n_group",
            "topk_group", "topk_method", "scoring_func", "norm_topk_prob", "routed_scaling_factor",
            "first_k_dense_replace", "tie_word_embeddings")  # fmt: skip
    edit_config(folder, lambda config: [config.pop(key) for key in drop])
    edit_tensors(folder, lambda tensors: tensors.pop("lm_head.weight"))
    return edit_config(folder, architectures=["YoutuForCausalLM"], model_type="youtu")


def test_a_model_without_experts(tmp_path: Path) -> None:
    conversion = converted(dense(tmp_path))
    found = keys(conversion)
    assert found["leading_dense_block_count"] == 3
    assert found["expert_feed_forward_length"] == found["feed_forward_length"] == 160
    assert found["expert_shared_count"] == 0
    assert not {"expert_count", "expert_used_count", "expert_gating_func", "expert_weights_scale",
                "expert_weights_norm", "expert_group_count"} & found.keys()  # fmt: skip
    names = {tensor.name for tensor in conversion.tensors}
    assert "output.weight" not in names
    assert not [name for name in names if "exps" in name]


def test_only_youtu_may_have_no_experts() -> None:
    with pytest.raises(BadConfig, match="no n_routed_experts"):
        DeepseekConfig.from_dict({k: v for k, v in STYLES["v3"].items() if k != "n_routed_experts"})


def test_glm_says_which_layers_are_dense_in_either_way() -> None:
    raw = STYLES["v3"] | {"architectures": ["Glm4MoeLiteForCausalLM"], "first_k_dense_replace": None}
    assert config_of(raw).first_k_dense_replace == 1
    kinds = ["dense", "dense", "sparse"]
    assert config_of(raw | {"mlp_layer_types": kinds}).first_k_dense_replace == 2
    with pytest.raises(BadConfig, match=r"mlp_layer_types is .*, expected 'dense' for the first layers"):
        config_of(raw | {"mlp_layer_types": kinds[::-1]})


def test_the_defaults_are_those_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    silent = ("norm_topk_prob", "routed_scaling_factor", "n_group", "topk_group", "first_k_dense_replace",
              "rms_norm_eps", "tie_word_embeddings")  # fmt: skip
    for name, n_experts in (("Glm4MoeLite", 8), ("Youtu", None)):
        theirs = getattr(transformers, f"{name}Config")()
        raw = {key: value for key, value in STYLES["v3"].items() if key not in silent}
        own = {"architectures": [f"{name}ForCausalLM"], "n_routed_experts": n_experts}
        ours = config_of(raw | own)
        for key in silent:
            if hasattr(theirs, key):
                assert getattr(ours, key) == getattr(theirs, key), (name, key)
