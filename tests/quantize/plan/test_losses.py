"""Losses files: written and read back, refused when they are wrong, added up."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gguf_tools.errors import BadRequest, FormatError
from gguf_tools.format.ggml_types import F32
from gguf_tools.format.tensors import TensorInfo
from quantize.plan.sensitivities import (
    Sensitivities,
    TensorSensitivity,
    read_sensitivities,
    write_sensitivities,
)
from tests.quantize.model_files import made_up_losses


def test_what_is_written_is_read(tmp_path: Path) -> None:
    losses = made_up_losses()
    write_sensitivities(losses, tmp_path / "losses.json")
    assert read_sensitivities(tmp_path / "losses.json") == losses
    assert list(tmp_path.iterdir()) == [tmp_path / "losses.json"]


def _contents(**changes: Any) -> dict[str, Any]:
    tensor = {"shape": [4, 256], "damage": {"Q4_K": 0.5}, "ratio": 0.5}
    return {"format": "gguf-tools losses", "version": 1, "tensors": {"t": {**tensor, **changes}}}


@pytest.mark.parametrize(
    ("contents", "complaint"),
    [
        ([], "not a losses file, expected a JSON object with format 'gguf-tools losses'"),
        ({"format": "gguf-tools losses", "version": 2}, "version 2 of losses files, expected 1"),
        ({**_contents(), "tensors": {}}, "tensors: expected losses of at least one tensor"),
        ({**_contents(), "tensors": {"t": 3}}, "t: expected an object with shape and damage"),
        (_contents(shape=[4, 0]), "t: shape is [4, 0], expected a list of sizes, rows first"),
        (_contents(shape=[4, 100]), "t: damage of Q4_K, whose blocks do not divide rows of 100"),
        (_contents(damage={}), "t: damage is {}, expected a number for at least one type"),
        (_contents(damage={"Q4_K": -1.0}), "t: damage of Q4_K is -1.0, expected a number from 0"),
        (_contents(damage={"Q4_K": True}), "t: damage of Q4_K is true, expected a number from 0"),
        (_contents(damage={"Q4_K": float("nan")}), "'NaN' is no finite number"),
        (_contents(damage={"Q9": 1.0}), "Q9"),
        (_contents(ratio="a"), "t: ratio is 'a', expected a number from 0"),
    ],
)
def test_a_wrong_file_is_refused_by_file_and_key(tmp_path: Path, contents: Any, complaint: str) -> None:
    path = tmp_path / "losses.json"
    path.write_text(json.dumps(contents))
    with pytest.raises(FormatError) as caught:
        read_sensitivities(path)
    assert complaint in str(caught.value)


def test_a_file_that_is_no_json_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_bytes(b"\xff\xfe{")
    with pytest.raises(BadRequest, match="not UTF-8"):
        read_sensitivities(tmp_path / "x.json")


def test_damages_add_up() -> None:
    losses = Sensitivities(
        {
            "a": TensorSensitivity((1, 256), {"Q4_K": 0.25, "Q2_K": 1.0}, ratio=0.5),
            "b": TensorSensitivity((1, 256), {"Q4_K": 0.125}),
        }
    )
    assert losses.predict({"a": "Q2_K", "b": "Q4_K", "norm": "F32"}) == 1.125
    assert losses.predict({"a": "Q2_K", "b": "Q4_K"}, calibrated=True) == 0.625
    assert losses.predict({"a": "F16", "b": "Q4_K"}) == 0.125
    with pytest.raises(BadRequest, match="b: the losses have no Q2_K, only Q4_K"):
        losses.predict({"b": "Q2_K"})


def test_losses_of_another_model_are_refused() -> None:
    losses = Sensitivities({"a": TensorSensitivity((1, 256), {"Q4_K": 0.25})})
    assert losses.fitted_to([TensorInfo("a", (1, 256), F32), TensorInfo("b", (2, 2), F32)]) == losses
    with pytest.raises(BadRequest, match="a: has losses, but the model lacks this tensor"):
        losses.fitted_to([TensorInfo("b", (1, 256), F32)])
    with pytest.raises(BadRequest, match="a: shape 2 x 256, and the losses have 1 x 256"):
        losses.fitted_to([TensorInfo("a", (2, 256), F32)])


K_B, V_B, KV_B = (f"blk.3.attn_{part}.weight" for part in ("k_b", "v_b", "kv_b"))
SPLIT = Sensitivities(
    {
        K_B: TensorSensitivity((4, 256, 128), {"Q8_0": 0.25, "Q4_0": 1.0}, ratio=0.25),
        V_B: TensorSensitivity((4, 128, 256), {"Q8_0": 0.5, "Q4_0": 2.0, "Q4_K": 3.0}, ratio=0.5),
    }
)


def test_losses_serve_another_layout_of_latent_attention() -> None:
    both = {K_B: (1024, 128), V_B: (512, 256), KV_B: (1024, 256)}
    fitted = SPLIT.fitted_to([TensorInfo(name, shape, F32) for name, shape in both.items()])
    assert {name: each.shape for name, each in fitted.tensors.items()} == {K_B: (1024, 128), V_B: (512, 256)}
    assert [fitted.tensors[name].by_type for name in (K_B, V_B)] == [
        SPLIT.tensors[name].by_type for name in (K_B, V_B)
    ]
    split = [TensorInfo(name, each.shape, F32) for name, each in SPLIT.tensors.items()]
    assert fitted.fitted_to(split) == SPLIT


def test_losses_of_a_matrix_are_those_of_its_halves() -> None:
    fitted = SPLIT.fitted_to([TensorInfo(KV_B, (1024, 256), F32)])
    assert fitted.tensors == {KV_B: TensorSensitivity((1024, 256), {"Q8_0": 0.75, "Q4_0": 3.0}, ratio=0.5)}
