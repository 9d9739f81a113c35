"""Gated delta nets: MTP layers, what a config.json may say, and rows that are read in any run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import convert
from convert.architectures.delta_net.arrange import tiled_heads
from convert.architectures.delta_net.config import DeltaNetConfig
from convert.architectures.delta_net.family import read_qwen3_next as read_next
from convert.architectures.delta_net.family import read_qwen35
from gguf_tools import GGUFFile, open_gguf
from gguf_tools.errors import BadConfig, BadRequest, UnsupportedCheckpoint
from tests.convert.architectures.rows import assert_runs_are_those_of_the_whole
from tests.support.checkpoints import edit_config, edit_tensors, read_config, read_tensors
from tests.support.published_models import PUBLISHED, write

QWEN35: dict[str, Any] = {**PUBLISHED["qwen3.5"].config, "architectures": ["Qwen3_5ForCausalLM"]}
NEXT: dict[str, Any] = PUBLISHED["qwen3-next"].config


def without_mtp(file: GGUFFile, n_layers: int) -> bool:
    """Whether a file has these layers, and says nothing of others."""
    architecture = file.get("general.architecture")
    recurrent = file.metadata[f"{architecture}.attention.recurrent_layers"].plain
    return (
        file.get(f"{architecture}.block_count") == len(recurrent) == n_layers
        and f"{architecture}.nextn_predict_layers" not in file.metadata
        and not any(name.startswith(f"blk.{n_layers}.") for name in file.tensors)
    )


@pytest.mark.parametrize(("name", "n_layers"), [("qwen3-next", 4), ("qwen3.5", 8)])
def test_mtp_layers_are_left_out_on_demand_or_where_there_are_none(
    name: str, n_layers: int, tmp_path: Path
) -> None:
    folder = write(name, tmp_path / "model")
    convert.convert(folder, tmp_path / "asked.gguf", mtp=False)
    mtp = [tensor for tensor in read_tensors(folder) if tensor.startswith("mtp.")]
    edit_tensors(folder, lambda tensors: [tensors.pop(tensor) for tensor in mtp])
    convert.convert(folder, tmp_path / "none.gguf")
    for file_name in ("asked.gguf", "none.gguf"):
        with open_gguf(tmp_path / file_name) as file:
            assert without_mtp(file, n_layers)


def test_an_mtp_layer_that_config_json_denies(tmp_path: Path) -> None:
    folder = write("qwen3.5", tmp_path / "model")
    text = read_config(folder)["text_config"]
    edit_config(folder, text_config={**text, "mtp_num_hidden_layers": 0})
    with pytest.raises(BadRequest, match="no MTP layer to keep"):
        convert.convert(folder, tmp_path / "out.gguf", mtp=True)
    convert.convert(folder, tmp_path / "out.gguf")
    with open_gguf(tmp_path / "out.gguf") as file:
        assert without_mtp(file, 8)


@pytest.mark.parametrize("name", ["qwen3-next", "qwen3.5", "qwen3.5-moe"])
def test_any_run_of_rows_is_that_of_the_whole(name: str, tmp_path: Path) -> None:
    assert_runs_are_those_of_the_whole(write(name, tmp_path / "model"))


def test_heads_are_tiled() -> None:
    config: DeltaNetConfig = read_qwen35(QWEN35, "config.json")
    assert (config.linear_num_key_heads, config.linear_num_value_heads) == (2, 6)
    assert tiled_heads(config, 1).tolist() == [0, 3, 1, 4, 2, 5]
    assert tiled_heads(config, 2).tolist() == [0, 1, 6, 7, 2, 3, 8, 9, 4, 5, 10, 11]


def test_sections_of_mrope_have_a_default() -> None:
    rope = {key: value for key, value in QWEN35["rope_parameters"].items() if key != "mrope_section"}
    config = read_qwen35({**QWEN35, "rope_parameters": rope}, "config.json")
    assert (config.mrope_section, config.states_section) == ((11, 11, 10), False)
    assert read_next(NEXT, "config.json").mrope_section is None


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"linear_num_value_heads": 5}, BadConfig, r"value_heads is 5, expected a multiple of .*heads \(2\)"),
        ({"linear_value_head_dim": 32}, UnsupportedCheckpoint, "keys and values of one size"),
        ({"layer_types": ["linear_attention"]}, BadConfig, "for each of the 8 layers"),
        ({"layer_types": ["sliding_attention"] * 8}, BadConfig, "'linear_attention' or 'full_attention'"),
        ({"attention_bias": True}, UnsupportedCheckpoint, "reads no biases"),
        ({"attn_output_gate": False}, UnsupportedCheckpoint, "always gates"),
        ({"mtp_num_hidden_layers": 2}, BadConfig, "expected a whole number from 0 to 1"),
        ({"rope_parameters": {"mrope_section": [1.5]}}, BadConfig, "up to four whole numbers"),
        ({"rope_parameters": {"mrope_section": [2**40]}}, BadConfig, "up to four whole numbers"),
        ({"full_attention_interval": 0}, BadConfig, "full_attention_interval is 0"),
    ],
)
def test_configurations_that_are_refused(
    changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        read_qwen35({**QWEN35, **changes}, "config.json")


@pytest.mark.parametrize(
    "changes", [{"decoder_sparse_step": 2}, {"mlp_only_layers": [0]}, {"norm_topk_prob": False}]
)
def test_a_qwen3_next_that_llama_cpp_does_not_compute(changes: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedCheckpoint, match="experts in every layer"):
        read_next({**NEXT, **changes}, "config.json")
