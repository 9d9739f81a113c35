"""Kimi Linear and Kimi K3: what their config.json may say, and the tokenizer."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import convert
from gguf_tools import open_gguf
from gguf_tools.errors import BadConfig, ToolkitError, UnsupportedCheckpoint
from tests.support.published_checkpoint import write_published
from tests.support.published_kimi import KIMI_MODELS
from tests.support.published_models import write


def changed(folder: Path, change: Callable[[dict[str, Any]], Any]) -> Path:
    config = json.loads((folder / "config.json").read_text())
    change(config.get("text_config", config))
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("name", "field", "value", "error", "told"),
    [
        ("kimi-linear", "q_lora_rank", 16, UnsupportedCheckpoint, "does not compress queries"),
        ("kimi-linear", "moe_renormalize", False, UnsupportedCheckpoint, "always normalises"),
        ("kimi-linear", "mla_use_nope", False, UnsupportedCheckpoint, "mla_use_nope"),
        ("kimi-linear", "rope_scaling", {"type": "yarn", "factor": 4.0}, BadConfig, "rotates nothing"),
        (
            "kimi-linear",
            "linear_attn_config",
            {"num_heads": 8},
            UnsupportedCheckpoint,
            r"linear_attn_config\.num_heads",
        ),
        ("kimi-linear", "linear_attn_config", {"full_attn_layers": 2}, BadConfig, "full_attn_layers"),
        ("kimi-linear", "linear_attn_config", {"full_attn_layers": []}, UnsupportedCheckpoint, "full_att"),
        ("kimi-k3", "linear_attn_config", {"gate_lower_bound": 1.0}, BadConfig, "a number below 0"),
        ("kimi-k3", "hidden_act", "silu", UnsupportedCheckpoint, "expected 'situ'"),
    ],
)
def test_what_llama_cpp_does_not_compute_is_refused(
    name: str, field: str, value: Any, error: type[ToolkitError], told: str, tmp_path: Path
) -> None:
    def change(config: dict[str, Any]) -> None:
        config[field] = {**config[field], **value} if field == "linear_attn_config" else value

    folder = changed(write(name, tmp_path / "m"), change)
    with pytest.raises(error, match=told):
        convert.convert(folder, tmp_path / "m.gguf")


def test_layers_follow_from_layer_types_as_well(tmp_path: Path) -> None:
    folder = write("kimi-linear", tmp_path / "m")
    kinds = ["linear_attention", "full_attention"] * 2

    def told_otherwise(config: dict[str, Any]) -> None:
        net = config.pop("linear_attn_config")
        config |= {"layer_types": kinds, "linear_head_dim": net["head_dim"], "linear_num_heads": 4}

    convert.convert(folder, tmp_path / "lists.gguf", provenance=False)
    convert.convert(changed(folder, told_otherwise), tmp_path / "types.gguf", provenance=False)
    assert (tmp_path / "types.gguf").read_bytes() == (tmp_path / "lists.gguf").read_bytes()


def test_groups_of_experts_are_written(tmp_path: Path) -> None:
    """llama.cpp's converter omits their number, and llama.cpp then chooses among all experts."""
    folder = changed(
        write("kimi-linear", tmp_path / "m"), lambda config: config.update(num_expert_group=3, topk_group=2)
    )
    convert.convert(folder, tmp_path / "m.gguf")
    with open_gguf(tmp_path / "m.gguf") as file:
        assert file.get("kimi-linear.expert_group_count") == 3
        assert file.get("kimi-linear.expert_group_used_count") == 2


def test_the_published_tokenizer(tmp_path: Path) -> None:
    model = KIMI_MODELS["kimi-linear"]
    tokens = {"vocab_size": 812, "bos_token_id": 556, "eos_token_id": 558}
    folder = write_published(
        replace(model, config={**model.config, **tokens}, tokenizer="kimi-k2"), tmp_path / "m"
    )
    convert.convert(folder, tmp_path / "m.gguf")
    with open_gguf(tmp_path / "m.gguf") as file:
        assert file.get("tokenizer.ggml.pre") == "kimi-k2"
        assert file.get("tokenizer.ggml.eos_token_id") == 558
