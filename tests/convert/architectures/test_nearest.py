"""An unknown architecture gets one line that names its nearest relative and what is missing."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import convert
from convert.architectures import find_architecture
from gguf_tools.errors import UnsupportedCheckpoint
from tests.support.checkpoints import edit_config, edit_tensors, micro_checkpoint, to_fp8


def refusal(folder: Path, **options: bool) -> str:
    with pytest.raises(UnsupportedCheckpoint) as caught:
        convert.convert(folder, folder / "out.gguf", **options)  # type: ignore[arg-type]
    assert not (folder / "out.gguf").exists()
    text = str(caught.value)
    assert "\n" not in text
    return text.rpartition("; the nearest is ")[2]


@pytest.mark.parametrize("version", ["V2", "V3"])
def test_the_nearest_family_is_that_of_the_tensors(version: str, tmp_path: Path) -> None:
    folder = micro_checkpoint(tmp_path, version.lower())
    edit_config(folder, architectures=[f"Deepseek{version}NovelForCausalLM"])
    assert refusal(folder) == (
        f"Deepseek{version}ForCausalLM (deepseek2), which knows all of its tensors;"
        " what is missing is how its config.json is read"
    )


def test_tensors_without_a_rule_are_named_once_for_all_layers(tmp_path: Path) -> None:
    folder = edit_config(to_fp8(micro_checkpoint(tmp_path, "v3")), architectures=["DeepseekV9ForCausalLM"])
    new = {f"model.layers.{layer}.self_attn.gate.weight": np.ones(4, np.float32) for layer in range(3)}
    edit_tensors(folder, lambda tensors: tensors.update(new))
    assert refusal(folder).endswith("which has no rule for model.layers.N.self_attn.gate.weight")


def test_without_tensors_the_name_alone_is_compared() -> None:
    with pytest.raises(UnsupportedCheckpoint, match=r"the nearest is Qwen3MoeForCausalLM \(qwen3moe\)$"):
        find_architecture({"architectures": ["Qwen3MoeNovelForCausalLM"]})
