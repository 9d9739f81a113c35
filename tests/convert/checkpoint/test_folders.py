"""Folders with an adapter, or with an index of files that are gone."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import gguf_tools.commands.convert
from convert.checkpoint.checkpoint import INDEX_NAME, Checkpoint
from convert.checkpoint.hub import weight_files
from gguf_tools.errors import CheckpointError, UnsupportedCheckpoint
from gguf_tools.hub.names import HubName
from tests.support.checkpoints import micro_checkpoint, shard, write_safetensors

ADAPTER = {"peft_type": "LORA", "base_model_name_or_path": "someone/base", "r": 4}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return micro_checkpoint(tmp_path / "model", "v2", num_hidden_layers=2)


def add_adapter(folder: Path, **config: object) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps({**ADAPTER, **config}))
    tensors = {"q_proj.lora_A.weight": np.ones((4, 4), np.float32)}
    write_safetensors(folder / "adapter_model.safetensors", tensors)
    for file in ("optimizer.pt", "scheduler.pt", "rng_state_0.pth", "training_args.bin"):
        (folder / file).write_bytes(b"a trainer's")
    return folder


def write_index(folder: Path, *files: str) -> None:
    places = {f"weight.{number}": file for number, file in enumerate(files)}
    (folder / INDEX_NAME).write_text(json.dumps({"weight_map": places}))


def refusal(folder: Path, capsys: pytest.CaptureFixture[str], *options: str) -> str:
    assert gguf_tools.commands.convert.main(["-q", str(folder), *options]) == 1
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    return err


@pytest.mark.parametrize("has_config", [False, True])
@pytest.mark.parametrize("pickled", [False, True])
def test_an_adapter_is_no_model(
    has_config: bool, pickled: bool, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    adapter = add_adapter(tmp_path / "adapter")
    if has_config:
        (folder / "config.json").rename(adapter / "config.json")
    if pickled:
        (adapter / "adapter_model.safetensors").rename(adapter / "adapter_model.bin")
    expected = (
        f"{adapter}: a LoRA adapter of someone/base (adapter_config.json), and no model: convert the folder"
        f" of that model, with --lora {adapter}"
    )
    for options in ([], ["--allow-pickle"]):
        assert expected in refusal(adapter, capsys, *options)


@pytest.mark.parametrize("has_config", [False, True])
@pytest.mark.parametrize("name", ["adapter_model.safetensors", "adapter_model.bin"])
def test_weights_of_an_adapter_show_what_they_are(
    name: str, has_config: bool, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    adapter = add_adapter(tmp_path / "adapter")
    (adapter / "adapter_model.safetensors").rename(adapter / name)
    (adapter / "adapter_config.json").unlink()
    if has_config:
        (folder / "config.json").rename(adapter / "config.json")
    assert f"{adapter}: an adapter (LoRA or another) of a model that nothing names ({name})" in refusal(
        adapter, capsys
    )


def test_an_adapter_in_a_folder_inside_is_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "model.safetensors").unlink()
    assert f"{add_adapter(folder / 'default')}: a LoRA adapter of someone/base" in refusal(folder, capsys)


def test_an_adapter_on_the_hub_is_no_model(tmp_path: Path) -> None:
    adapter = add_adapter(tmp_path / "adapter", peft_type="IA3", base_model_name_or_path=None)
    with pytest.raises(UnsupportedCheckpoint, match=r"an adapter \(IA3\) of a model that it does not name"):
        weight_files(HubName("a/b"), adapter, ["adapter_model.safetensors", "adapter_config.json"])


def test_an_adapter_beside_a_model_is_noted(folder: Path) -> None:
    with Checkpoint(folder) as checkpoint:
        assert checkpoint.notes == ()
    with Checkpoint(add_adapter(folder)) as checkpoint:
        (note,) = checkpoint.notes
    assert note.startswith("adapter_config.json is here, but the adapter is not used")


def test_an_index_of_files_that_are_gone_is_noted(folder: Path) -> None:
    with Checkpoint(folder) as checkpoint:
        names = checkpoint.names()
    write_index(folder, "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    with Checkpoint(folder) as checkpoint:
        assert checkpoint.names() == names
        (note,) = checkpoint.notes
    assert note.startswith("model.safetensors.index.json names none of the files that are here")
    files = ["model.safetensors", INDEX_NAME]
    assert weight_files(HubName("a/b"), folder, files) == ("model.safetensors",)


def test_a_single_file_beside_some_shards_is_ambiguous(folder: Path) -> None:
    write_index(folder, "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    write_safetensors(folder / "model-00001-of-00002.safetensors", {"weight.0": np.ones(2, np.float32)})
    with pytest.raises(CheckpointError, match=r"1 of the 2 shards of .*; remove one of them"):
        Checkpoint(folder)


def test_shards_of_another_number_are_named(folder: Path) -> None:
    write_index(shard(folder), "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    with pytest.raises(CheckpointError, match=r"model-00001-of-00003\.safetensors is here, which"):
        Checkpoint(folder)
