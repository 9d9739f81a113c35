"""Ling 3: what its config.json may say, and the layers and limits that follow from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import convert
from convert.architectures import find_by_gguf_name
from convert.architectures.kimi.ling3 import read_ling3_file
from gguf_tools import edit, open_gguf
from gguf_tools.errors import BadConfig, FormatError, MissingTensor, ToolkitError, UnsupportedCheckpoint
from tests.support.checkpoints import edit_config
from tests.support.published_models import write


@pytest.mark.parametrize(
    ("field", "value", "error", "told"),
    [
        ("no_kda_lora", False, UnsupportedCheckpoint, "no_kda_lora"),
        ("kda_safe_gate", False, UnsupportedCheckpoint, "kda_safe_gate"),
        ("gated_attention_proj_granularity_type", "element_wise", UnsupportedCheckpoint, "head_wise"),
        ("kda_lower_bound", 1.0, BadConfig, "a number below 0"),
        ("kda_lower_bound", None, BadConfig, "a number below 0"),
        ("rope_scaling", {"type": "yarn", "factor": 4.0}, BadConfig, "doesn't sharpen"),
        ("linear_num_heads", 8, UnsupportedCheckpoint, "as many heads"),
        ("layer_group_size", 1, UnsupportedCheckpoint, "no layer of linear_attention"),
        ("expert_swiglu_limit_list", [1.0, "x"], BadConfig, "a list of numbers"),
        # As transformers' class has it where config.json doesn't say; here, the last layer is not of KDA.
        ("layer_types", ["linear_attention", "full_attention"] * 2 + ["linear_attention"], MissingTensor,
         "A_log"),
    ],
)  # fmt: skip
def test_what_llama_cpp_does_not_compute_is_refused(
    field: str, value: Any, error: type[ToolkitError], told: str, tmp_path: Path
) -> None:
    folder = write("ling-3-flash", tmp_path / "m")
    edit_config(folder, **{field: value})
    with pytest.raises(error, match=told):
        convert.convert(folder, tmp_path / "m.gguf")


def test_a_file_without_the_mtp_layer_has_no_numbers_for_it(tmp_path: Path) -> None:
    convert.convert(write("ling-3-flash", tmp_path / "m"), tmp_path / "m.gguf", mtp=False)
    with open_gguf(tmp_path / "m.gguf") as file:
        assert file.get("bailingmoe3.attention.head_count_kv") == (0, 1, 0, 1, 1)
        assert file.get("bailingmoe3.swiglu_clamp_exp") == (0.0, 0.0, 2.0, 0.0, 1.5)
        assert file.get("bailingmoe3.nextn_predict_layers") is None


@pytest.mark.parametrize(
    ("assignment", "error", "told"),
    [
        ("kda.gate_lower_bound=1.0", FormatError, r"gate_lower_bound is .*, expected a bound below 0"),
        ("kda.safe_gate=false", FormatError, r"gate_lower_bound is .*, expected a bound below 0"),
        (
            "rope.dimension_sections=[2,2,2,0]",
            UnsupportedCheckpoint,
            r"sections is \(2, 2, 2, 0\), expected none",
        ),
    ],
)
def test_a_file_that_is_computed_otherwise_is_refused(
    assignment: str, error: type[ToolkitError], told: str, tmp_path: Path
) -> None:
    convert.convert(write("ling-3-tiny", tmp_path / "m"), tmp_path / "m.gguf")
    family = find_by_gguf_name("bailingmoe3")
    assert family is not None
    with open_gguf(tmp_path / "m.gguf") as file:
        change = edit.parse_assignment(f"bailingmoe3.{assignment}")
        metadata = edit.set_values(file.metadata, [change]).metadata
        shapes = {name: tensor.shape for name, tensor in file.tensors.items()}
    with pytest.raises(error, match=told):
        read_ling3_file(family, metadata, shapes, "m.gguf")
