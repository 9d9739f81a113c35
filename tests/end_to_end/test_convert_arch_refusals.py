"""Models of other architectures: what is wrong with a folder is named before anything is written; notes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

import convert
import gguf_tools.commands.convert
from gguf_tools import open_gguf
from gguf_tools.errors import CheckpointError, MissingTensor, UnexpectedTensors, UnsupportedCheckpoint
from tests.end_to_end.arch_models import CASES, model
from tests.support.checkpoints import edit_config, edit_tensors, read_config, read_tensors

BYTE_LEVEL = [case for case in CASES if (model(case) / "tokenizer.json").is_file() and case != "mixtral"]


def copied(case: str, tmp_path: Path) -> Path:
    return Path(shutil.copytree(model(case), tmp_path / case))


def refused(folder: Path, error: type[CheckpointError], words: str) -> None:
    with pytest.raises(error, match=words) as caught:
        convert.convert(folder, folder / "out.gguf")
    assert "\n" not in str(caught.value)
    assert not list(folder.glob("*.gguf*"))


@pytest.mark.parametrize("case", CASES)
def test_one_tensor_missing(case: str, tmp_path: Path) -> None:
    folder = copied(case, tmp_path)
    name = next(name for name in read_tensors(folder) if ".layers.1." in name and "_proj" in name)
    edit_tensors(folder, lambda tensors: tensors.pop(name))
    refused(folder, MissingTensor, r"missing 1 tensor: .*layers\.1\.")


@pytest.mark.parametrize("case", CASES)
def test_one_tensor_too_many(case: str, tmp_path: Path) -> None:
    folder = copied(case, tmp_path)
    edit_tensors(folder, lambda tensors: tensors.update({"model.extra.weight": np.ones(4, np.float32)}))
    refused(folder, UnexpectedTensors, r"unexpected 1 tensor: model\.extra\.weight")


@pytest.mark.parametrize("case", CASES)
def test_a_wrong_shape(case: str, tmp_path: Path) -> None:
    folder = copied(case, tmp_path)
    name = next(name for name in read_tensors(folder) if name.endswith("model.norm.weight"))
    edit_tensors(folder, lambda tensors: tensors.update({name: tensors[name][:-1]}))
    refused(folder, CheckpointError, r"norm\.weight: shape \(\d+,\), expected \(\d+,\) from config\.json")


@pytest.mark.parametrize("case", CASES)
def test_a_rope_type_nobody_knows(case: str, tmp_path: Path) -> None:
    folder = copied(case, tmp_path)
    scaling = {"rope_type": "spiral", "factor": 2.0}
    text = read_config(folder).get("text_config")
    if text is None:
        edit_config(folder, rope_scaling=scaling)
    else:
        edit_config(folder, text_config={**text, "rope_scaling": scaling})
    refused(folder, UnsupportedCheckpoint, r"rope_scaling: RoPE of type 'spiral', expected")


@pytest.mark.parametrize("case", BYTE_LEVEL)
def test_a_tokenizer_with_an_unknown_cutting(case: str, tmp_path: Path) -> None:
    folder = copied(case, tmp_path)
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    content["pre_tokenizer"] = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": False,
    }
    path.write_text(json.dumps(content), encoding="utf-8")
    refused(folder, CheckpointError, r"pre-tokenizer not recognised: found bytes")


def test_the_note_on_yarn_names_the_flag(tmp_path: Path) -> None:
    result = convert.convert(model("kimi-k2"), tmp_path / "kimi.gguf", outtype="bf16")
    assert [note for note in result.preparation.plan.notes if note.endswith("run it with --yarn-beta-fast 1")]


def test_kimi_s_vision_part_is_left_out_with_a_note(tmp_path: Path) -> None:
    notes = convert.convert(model("kimi-k2.5"), tmp_path / "kimi.gguf").preparation.plan.notes
    assert [note for note in notes if note.startswith("left out 6 tensors (mm_projector.")]


def test_glm_s_mtp_layer_is_kept_unless_told_otherwise(tmp_path: Path) -> None:
    words = [str(model("glm-4.7-flash")), "--outtype", "bf16", "--outfile"]
    assert gguf_tools.commands.convert.main([*words, str(tmp_path / "without.gguf"), "--no-mtp"]) == 0
    with open_gguf(tmp_path / "without.gguf") as file:
        assert file.get("deepseek2.block_count") == 2
        assert "deepseek2.nextn_predict_layers" not in file.metadata
        assert not [name for name in file.tensors if name.startswith("blk.2.")]


def test_a_checkpoint_without_its_mtp_layer_goes_without(tmp_path: Path) -> None:
    folder = copied("glm-4.7-flash", tmp_path)

    def drop(tensors: dict[str, np.ndarray]) -> None:
        for name in [name for name in tensors if name.startswith("model.layers.2.")]:
            del tensors[name]

    edit_tensors(folder, drop)
    convert.convert(folder, tmp_path / "glm.gguf", outtype="bf16")
    with open_gguf(tmp_path / "glm.gguf") as file:
        assert file.get("deepseek2.block_count") == 2
