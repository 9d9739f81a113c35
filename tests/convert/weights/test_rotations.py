"""A checkpoint whose modules have rotated inputs is refused, whatever says so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import convert
from gguf_tools.errors import UnsupportedCheckpoint
from tests.support.checkpoints import Tensors, write_checkpoint

INT8 = {"a.weight": np.ones((2, 2), np.int8), "a.weight_scale": np.ones(1, np.float32)}
METHOD = {"quant_method": "compressed-tensors", "format": "int-quantized"}

STATED: dict[str, Any] = {
    "hadamard_config": {"block_size": 32, "hadamard_type": "hadamard"},
    "rotation_config": {"backend": "auto", "block_size": 32},
    "transform_config": {"config_groups": {"u": {"type": "hadamard"}}},
    "rotation": "hadamard",
    "hadamard_group_size": 32,
    "quarot": True,
    "SpinQuant": {"r1": True},
    "spin_quant_path": "R.bin",
    "online_rotation": [1],
    "rotate_inputs": 1,
    "had_dim": 128,
    "online_had": True,
    "w_rot": "R.pt",
    "incoherence": True,
}
NOTHING: dict[str, Any] = {
    "transform_config": {"config_groups": {}},
    "rotation": None,
    "hadamard_config": "none",
    "rotate": {"enable": False, "block_size": 128},
    "quarot": False,
    "transformers_version": "5.0",
    "preset": "rotary",
}
TENSORS = (
    "a.hadamard", "spinquant_R1", "a.had_K", "layers.0.a.rotation", "a.rotation_matrix", "a.input_transform",
    "a.R4_hadamard.weight",
)  # fmt: skip


def opened(folder: Path, quantization: dict[str, Any], tensors: Tensors, **config: Any) -> Any:
    write_checkpoint(folder, {"quantization_config": {**METHOD, **quantization}, **config}, tensors)
    return convert.open_checkpoint(folder)


@pytest.mark.parametrize("key", STATED)
@pytest.mark.parametrize("inside", [False, True])
def test_a_stated_rotation_is_refused_at_any_depth(key: str, inside: bool, tmp_path: Path) -> None:
    stated = {key: STATED[key]}
    where = f"meta.0.{key}" if inside else key
    with pytest.raises(
        UnsupportedCheckpoint, match=rf"config\.json: quantization_config\.{where}: the model rotates"
    ) as caught:
        opened(tmp_path, {"meta": [stated]} if inside else stated, INT8)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("value", ["hadamard", "QuaRot", "SpinQuantModifier", "random-hadamard"])
def test_a_rotation_may_be_a_value(value: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedCheckpoint, match=r"config\.steps\.1\.kind: the model rotates"):
        opened(tmp_path, {"steps": [{"kind": "awq"}, {"kind": value}]}, INT8)


@pytest.mark.parametrize("key", NOTHING)
def test_a_rotation_that_is_off_is_none(key: str, tmp_path: Path) -> None:
    with opened(tmp_path, {key: NOTHING[key]}, INT8) as weights:
        assert weights.read("a.weight").tolist() == [[1, 1], [1, 1]]


@pytest.mark.parametrize("key", ["quarot", "spinquant_config", "rotation_config", "online_rotation"])
def test_config_json_itself_may_state_it(key: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedCheckpoint, match=rf"config\.json: {key}: the model rotates"):
        opened(tmp_path, {}, INT8, **{key: {"size": 8}})


@pytest.mark.parametrize("file", ["quantize_config.json", "quantization_config.json"])
def test_files_beside_config_json_may_state_it(file: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, {"quantization_config": METHOD}, INT8)
    (tmp_path / file).write_text(json.dumps({"rotation": "hadamard"}))
    with pytest.raises(UnsupportedCheckpoint, match=rf"{file}: rotation: the model rotates"):
        convert.open_checkpoint(tmp_path)


@pytest.mark.parametrize("name", TENSORS)
def test_its_matrices_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedCheckpoint, match=rf"safetensors: {name}: the model rotates"):
        opened(tmp_path, {}, {**INT8, name: np.ones((2, 2), np.float32)})


def test_unknown_keys_are_noted(tmp_path: Path) -> None:
    new = {"new_scheme": "x", "other": {"a": 1}, "absent": None, "off": False}
    with opened(tmp_path, {**new, "ignore": ["lm_head"]}, INT8) as weights:
        assert weights.notes == (
            "config.json: quantization_config.new_scheme, quantization_config.other: not read",
        )


def test_the_kind_of_model_may_state_it(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedCheckpoint, match="model_type is prism_hadamard_qwen35: the model rotates"):
        opened(tmp_path, {}, INT8, model_type="prism_hadamard_qwen35")
