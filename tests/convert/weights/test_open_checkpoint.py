"""Opening checkpoints from Python and from the command line; pickles only where they are asked for."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import convert
from gguf_tools.commands import convert as convert_cli
from gguf_tools.commands import main as cli
from gguf_tools.errors import CheckpointError, UnsupportedCheckpoint
from tests.support.checkpoints import quantize_fp8, write_checkpoint

ROOT = Path(__file__).parents[3]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    codes, scales = quantize_fp8(np.ones((4, 6), np.float32), (2, 6))
    tensors = {
        "a.weight": codes, "a.weight_scale_inv": scales, "a.input_scale": np.ones(1, np.float32),
        "a.bias": np.arange(4).astype(ml_dtypes.bfloat16),
    }  # fmt: skip
    quantization = {"quant_method": "fp8", "weight_block_size": [2, 6]}
    return write_checkpoint(tmp_path / "hf", {"quantization_config": quantization}, tensors)


def test_weights_are_read_whole_and_by_rows_in_float32(folder: Path) -> None:
    with convert.open_checkpoint(str(folder)) as weights:
        assert weights.names() == ("a.bias", "a.weight")
        assert weights.read("a.bias").dtype == np.float32
        assert weights.read("a.bias").tolist() == [0, 1, 2, 3]
        assert weights.read_rows("a.weight", 1, 3).shape == (2, 6)
        assert np.allclose(weights.read("a.weight"), 1)


def test_a_closed_checkpoint_and_an_unknown_name_say_so(folder: Path) -> None:
    weights = convert.open_checkpoint(folder)
    with pytest.raises(CheckpointError, match="no weight b"):
        weights.read("b")
    weights.close()
    with pytest.raises(CheckpointError, match="Bad file descriptor"):
        weights.read("a.bias")


def test_the_command_lists_weights(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["checkpoint", str(folder)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "name      shape   bits  stored as",
        "a.bias        4  16.00  BF16",
        "a.weight  4 x 6  10.67  F8_E4M3 in blocks of 2x6",
        "",
        "2 tensors, 28 weights, 40 bytes, 11.43 bits per weight",
        "1 more dropped: scales activations, not weights",
    ]


def test_the_command_gives_the_same_as_json(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["checkpoint", "--json", str(folder)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["quant_method"] == "fp8"
    assert found["tensors"][1] == {
        "name": "a.weight", "shape": [4, 6], "stored_as": "F8_E4M3 in blocks of 2x6",
        "bits_per_weight": 10.6667,
    }  # fmt: skip
    assert found["dropped"] == {"a.input_scale": "scales activations, not weights"}


def test_an_unreadable_checkpoint_is_one_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["quant_method"] = "vptq"
    (folder / "config.json").write_text(json.dumps(config))
    assert cli.main(["checkpoint", str(folder)]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert "quant_method is 'vptq'" in lines[0]
    assert "first such tensor: a.weight (F8_E4M3)" in lines[0]


def test_listing_loads_neither_numba_nor_torch(folder: Path) -> None:
    probe = (
        f"import sys; from gguf_tools.commands import main; main.main(['checkpoint', {str(folder)!r}]);"
        "print([name for name in ('numba', 'torch') if name in sys.modules])"
    )
    command = [sys.executable, "-c", probe]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert found.stdout.splitlines()[-1] == "[]"


# ---- pickles


class Bomb:
    """What a pickle must not be able to do: leave a file behind."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


@pytest.fixture
def pickled(tmp_path: Path) -> Path:
    torch = pytest.importorskip("torch")
    (tmp_path / "config.json").write_text("{}")
    base = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    state = {
        "a.weight": base.to(torch.bfloat16), "a.turned": base.T, "a.empty": torch.zeros(0, 3),
        "a.scalar": torch.tensor(0.5), "b.weight": base.to(torch.float8_e4m3fn),
        "b.weight_scale": torch.tensor([2.0]),
    }  # fmt: skip
    torch.save(state, tmp_path / "pytorch_model.bin")
    return tmp_path


def test_a_pickle_is_refused_by_default(pickled: Path) -> None:
    with pytest.raises(UnsupportedCheckpoint, match=r"can run any code; expected .*allow_pickle=True\)$"):
        convert.open_checkpoint(pickled)


def test_a_pickle_is_read_where_it_is_asked_for(pickled: Path) -> None:
    base = np.arange(24, dtype=np.float32).reshape(4, 6)
    with convert.open_checkpoint(pickled, allow_pickle=True) as weights:
        assert weights.names() == ("a.empty", "a.scalar", "a.turned", "a.weight", "b.weight")
        assert weights.read("a.empty").shape == (0, 3)
        assert weights.read("a.scalar") == np.float32(0.5)
        assert np.array_equal(weights.read("a.turned"), base.T)
        assert np.array_equal(weights.read_rows("a.weight", 1, 3), base[1:3])
        assert np.array_equal(
            weights.read("b.weight"), 2 * base.astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
        )
        raw = weights.checkpoint.raw("a.turned")
        assert np.array_equal(raw.read_columns(1, 3), base.T[:, 1:3])
        assert np.array_equal(raw.read_elements(3, 9), base.T.reshape(-1)[3:9])


def test_shards_of_pickles_are_those_of_their_index(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    (tmp_path / "config.json").write_text("{}")
    for number, name in enumerate(("a.weight", "b.weight"), 1):
        torch.save({name: torch.full((2, 2), 1.5)}, tmp_path / f"pytorch_model-{number:05}-of-00002.bin")
    torch.save({"step": torch.ones(1)}, tmp_path / "state.bin")  # not named by the index
    index = tmp_path / "pytorch_model.bin.index.json"
    places = {f"{name}.weight": f"pytorch_model-0000{n}-of-00002.bin" for n, name in ((1, "a"), (2, "b"))}
    index.write_text(json.dumps({"weight_map": places}))
    with convert.open_checkpoint(tmp_path, allow_pickle=True) as weights:
        assert weights.names() == ("a.weight", "b.weight")
    (tmp_path / places["b.weight"]).unlink()
    with pytest.raises(CheckpointError, match=rf"of-00002\.bin: missing shard; {index.name} places 1"):
        convert.open_checkpoint(tmp_path, allow_pickle=True)
    with pytest.raises(UnsupportedCheckpoint, match="can run any code"):
        convert.open_checkpoint(tmp_path)


def test_a_pickle_of_the_old_kind_with_a_state_dict(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    (tmp_path / "config.json").write_text("{}")
    state = {"epoch": 3, "state_dict": {"a.weight": torch.ones(2, 2)}}
    torch.save(state, tmp_path / "model.pt", _use_new_zipfile_serialization=False)
    with convert.open_checkpoint(tmp_path, allow_pickle=True) as weights:
        assert np.array_equal(weights.read("a.weight"), np.ones((2, 2)))


def test_a_pickle_that_runs_code_does_not_get_to(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(
        pickle.dumps({"a.weight": Bomb(tmp_path / "bang")}, protocol=2)
    )
    with pytest.raises(CheckpointError, match="torch can't read it as weights only: ") as caught:
        convert.open_checkpoint(tmp_path, allow_pickle=True)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "bang").exists()


def test_a_pickle_of_something_else_is_an_error(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    (tmp_path / "config.json").write_text("{}")
    torch.save({"a.weight": [1, 2]}, tmp_path / "pytorch_model.bin")
    with pytest.raises(UnsupportedCheckpoint, match=r"'a\.weight' is list, expected tensors by name"):
        convert.open_checkpoint(tmp_path, allow_pickle=True)


def test_tensors_without_plain_data_are_refused(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    (tmp_path / "config.json").write_text("{}")
    parts = [torch.zeros(2, 3), torch.zeros(1, 3)]
    for tensor, complaint in (
        (torch.nested.nested_tensor(parts), "nested"),
        (torch.nested.nested_tensor(parts, layout=torch.jagged), "names torch.nested"),
        (torch.eye(3).to_sparse(), "sparse"),
        (torch.zeros(3, device="meta"), "is nested, sparse or without data"),
        (torch.zeros(1).expand(10**15), "has more elements than are stored"),
    ):
        torch.save({"a.weight": tensor}, tmp_path / "pytorch_model.bin")
        with pytest.raises(CheckpointError, match=complaint):
            convert.open_checkpoint(tmp_path, allow_pickle=True)


def test_an_old_torch_is_not_trusted(pickled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr("torch.__version__", "2.9.1+cpu")
    with convert.open_checkpoint(pickled, allow_pickle=True) as weights:
        assert "a.weight" in weights.names()
    torch.save(
        {"a.weight": torch.ones(2)}, pickled / "pytorch_model.bin", _use_new_zipfile_serialization=False
    )
    with pytest.raises(UnsupportedCheckpoint, match=r"torch 2\.9\.1\+cpu .*expected 2\.10 or newer"):
        convert.open_checkpoint(pickled, allow_pickle=True)


def test_the_flags_reach_the_checkpoint(pickled: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["checkpoint", str(pickled)]) == 1
    assert cli.main(["checkpoint", "--allow-pickle", str(pickled)]) == 0
    capsys.readouterr()
    assert convert_cli.main([str(pickled), "--dry-run"]) == 1
    assert "a pickle checkpoint" in capsys.readouterr().err
    assert convert_cli.main([str(pickled), "--dry-run", "--allow-pickle"]) == 1
    assert "pickle" not in capsys.readouterr().err


@pytest.mark.parametrize("name", ["output.safetensors", "gptq_model-4bit-128g.safetensors"])
def test_other_names_of_weight_files(name: str, folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / name)
    with convert.open_checkpoint(folder) as weights:
        assert weights.names() == ("a.bias", "a.weight")
