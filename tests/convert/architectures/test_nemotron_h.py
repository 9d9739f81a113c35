"""Nemotron-H and Nemotron 3: what a config.json may say, names of weights, and the MTP layer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import convert
from convert.architectures.recurrent.nemotron_h import FAMILIES, choose, read_config
from gguf_tools import open_gguf
from gguf_tools.errors import BadConfig, BadRequest, FormatError, UnsupportedCheckpoint
from gguf_tools.format.values import Value
from tests.convert.architectures.rows import assert_runs_are_those_of_the_whole
from tests.support.checkpoints import edit_config, edit_tensors
from tests.support.published_models import PUBLISHED, write

DENSE: dict[str, Any] = PUBLISHED["nemotron-h"].config
NANO: dict[str, Any] = PUBLISHED["nemotron-3-nano"].config
SUPER: dict[str, Any] = PUBLISHED["nemotron-3-super"].config
BLOCKS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}


@pytest.mark.parametrize("config", [DENSE, NANO])
def test_layers_may_be_named_in_words(config: dict[str, Any]) -> None:
    """transformers 5 saves a list, and sizes of experts that a dense model hasn't got."""
    spelled = {key: value for key, value in config.items() if key != "hybrid_override_pattern"}
    spelled["layers_block_type"] = [BLOCKS[letter] for letter in config["hybrid_override_pattern"]]
    spelled |= {"n_routed_experts": 6, "num_experts_per_tok": 2}
    assert read_config(spelled, "config.json") == read_config(config, "config.json")
    assert choose(spelled).gguf_name == choose(config).gguf_name


@pytest.mark.parametrize(
    ("config", "changes", "error", "words"),
    [
        (DENSE, {"hybrid_override_pattern": "M-X"}, BadConfig, "_pattern is 'M-X', expected a letter"),
        (DENSE, {"hybrid_override_pattern": None}, BadConfig, "no layers_block_type, expected a letter of"),
        (DENSE, {"hybrid_override_pattern": 5}, BadConfig, "hybrid_override_pattern is 5, expected a letter"),
        (NANO, {"hybrid_override_pattern": "ME-*"}, UnsupportedCheckpoint, "dense blocks and experts"),
        (NANO, {"mlp_hidden_act": "silu"}, UnsupportedCheckpoint, "is 'silu', expected 'relu2'"),
        (NANO, {"use_bias": True}, UnsupportedCheckpoint, "use_bias is True, expected False"),
        (NANO, {"norm_eps": 1e-6}, UnsupportedCheckpoint, "norm_eps is 1e-06, expected 1e-05"),
        (NANO, {"layer_norm_epsilon": "x"}, BadConfig, "epsilon is 'x', expected a positive number"),
        (NANO, {"n_groups": 5}, BadConfig, r"n_groups is 5, expected a divisor of mamba_num_heads \(12\)"),
        (NANO, {"time_step_limit": [0.0, 0.1]}, BadConfig, "time_step_limit"),
        (NANO, {"time_step_limit": 3}, BadConfig, "time_step_limit is 3, expected none"),
        (SUPER, {"mtp_hybrid_override_pattern": "*"}, UnsupportedCheckpoint, "mtp_hybrid_override_pattern"),
        (SUPER, {"num_nextn_predict_layers": 2}, BadConfig, "num_nextn_predict_layers is 2"),
    ],
)  # fmt: skip
def test_what_is_not_covered_is_refused(
    config: dict[str, Any], changes: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words) as refusal:
        read_config({**config, **changes}, "config.json")
    assert "\n" not in str(refusal.value)


def test_names_of_transformers_are_those_of_published_checkpoints(tmp_path: Path) -> None:
    folder = write("nemotron-3-nano", tmp_path / "model")
    convert.convert(folder, tmp_path / "published.gguf")

    def rename(tensors: dict[str, np.ndarray]) -> None:
        for name in list(tensors):
            tensors[name.replace("backbone.", "model.")] = tensors.pop(name)

    edit_tensors(folder, rename)
    convert.convert(folder, tmp_path / "saved.gguf")
    with open_gguf(tmp_path / "published.gguf") as published, open_gguf(tmp_path / "saved.gguf") as saved:
        assert published.metadata == saved.metadata
        assert {*published.tensors} == {*saved.tensors}
        assert all(bytes(published.raw(name)) == bytes(saved.raw(name)) for name in saved.tensors)


def test_the_mtp_layer_is_left_out_on_demand(tmp_path: Path) -> None:
    folder = write("nemotron-3-super", tmp_path / "model")
    convert.convert(folder, tmp_path / "out.gguf", mtp=False)
    with open_gguf(tmp_path / "out.gguf") as file:
        assert file.get("nemotron_h_moe.block_count") == 5
        assert len(file.metadata["nemotron_h_moe.feed_forward_length"].plain) == 5
        assert "nemotron_h_moe.nextn_predict_layers" not in file.metadata
        assert not any(name.startswith("blk.5.") for name in file.tensors)
    edit_config(folder, num_nextn_predict_layers=0)
    with pytest.raises(BadRequest, match="no MTP layer to keep"):
        convert.convert(folder, tmp_path / "asked.gguf", mtp=True)


@pytest.mark.parametrize("name", ["nemotron-h", "nemotron-3-super"])
def test_any_run_of_rows_is_that_of_the_whole(name: str, tmp_path: Path) -> None:
    assert_runs_are_those_of_the_whole(write(name, tmp_path / "model"))


@pytest.mark.parametrize("name", ["nemotron-h", "nemotron-3-nano", "nemotron-3-super"])
def test_a_file_says_what_config_json_does(name: str, tmp_path: Path) -> None:
    expected = read_config(PUBLISHED[name].config, "config.json")
    convert.convert(write(name, tmp_path / "model"), tmp_path / "out.gguf")
    with open_gguf(tmp_path / "out.gguf") as file:
        architecture = str(file.get("general.architecture"))
        shapes = {each: info.shape for each, info in file.tensors.items()}
        (family,) = (each for each in FAMILIES if each.gguf_name == architecture)
        found = family.read_file(file.metadata, shapes, "out.gguf")
        same = ["kinds", "mamba_layers", "mamba_rows", "in_rows", "expert_cols", "head_dim", "rms_norm_eps"]
        if expected.num_experts:
            same += ["norm_topk_prob", "scoring_func", "routed_scaling_factor", "shared_intermediate_size"]
        for key in same:
            assert getattr(found, key) == pytest.approx(getattr(expected, key)), key
        heads = f"{architecture}.attention.head_count_kv"
        with pytest.raises(FormatError, match=r"head_count_kv .*expected \d"):
            family.read_file({**file.metadata, heads: Value.u32s([2])}, shapes, "out.gguf")
        one = family.read_file({**file.metadata, heads: Value.u32(2)}, shapes, "out.gguf")
        assert set(one.kinds[: one.num_hidden_layers]) <= set("*-E"), "one number holds for all layers"
        groups = f"{architecture}.ssm.group_count"
        with pytest.raises(FormatError, match="12 heads in 5 groups have 192 columns"):
            family.read_file({**file.metadata, groups: Value.u32(5)}, shapes, "out.gguf")
