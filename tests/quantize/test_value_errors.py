"""Errors between the values of two files, against the definition."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from gguf_tools.commands.main import main
from gguf_tools.files.partial_file import GGUFWriter
from gguf_tools.format.ggml_types import BF16, F16, F32
from gguf_tools.format.shards import FileLayout, open_gguf
from gguf_tools.format.tensors import TensorInfo
from gguf_tools.format.values import Value
from quantize.arrays import decode
from quantize.pipeline import quantize
from quantize.value_errors import compare_values

SHAPES = {
    "token_embd.weight": (64, 256),
    **{f"blk.{layer}.ffn_up.weight": (256, 512) for layer in range(3)},
    "blk.0.attn_norm.weight": (256,),
}


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    """A model in F16 and F32, and the same as Q4_0 with its embedding in Q6_K."""
    rng = np.random.default_rng(0)
    infos = [TensorInfo(name, shape, F16 if len(shape) > 1 else F32) for name, shape in SHAPES.items()]
    metadata = {"general.architecture": Value.string("llama"), "llama.block_count": Value.u32(3)}
    layout = FileLayout.of(metadata, infos)
    with GGUFWriter(tmp_path / "a.gguf", layout) as writer:
        for info in infos:
            values = rng.standard_normal(info.shape) * (1 + len(info.name))
            writer.write(layout.offset_of(info.name), values.astype("<f2" if info.type == F16 else "<f4"))
        writer.publish()
    quantize(tmp_path / "a.gguf", tmp_path / "b.gguf", "Q4_0")
    return tmp_path / "a.gguf", tmp_path / "b.gguf"


def test_scales_beside_weights_count(tmp_path: Path) -> None:
    """A matrix that is stored divided by its scale has the values of the one that is not."""
    weight = np.random.default_rng(0).standard_normal((8, 64)).astype("<f4")
    scale = np.array([0.25], "<f4")
    metadata = {"general.architecture": Value.string("llama"), "llama.block_count": Value.u32(1)}
    for name, arrays in (
        ("a.gguf", {"blk.0.ffn_up.weight": weight}),
        ("b.gguf", {"blk.0.ffn_up.weight": weight * 4, "blk.0.ffn_up.scale": scale}),
    ):
        layout = FileLayout.of(metadata, [TensorInfo(key, array.shape, F32) for key, array in arrays.items()])
        with GGUFWriter(tmp_path / name, layout) as writer:
            for key, array in arrays.items():
                writer.write(layout.offset_of(key), array.astype("<f4").tobytes())
            writer.publish()
    with open_gguf(tmp_path / "a.gguf") as a, open_gguf(tmp_path / "b.gguf") as b:
        (found,) = compare_values(a, b).tensors
    assert found.squared_error == 0


def test_errors_are_those_of_the_definition(files: tuple[Path, Path]) -> None:
    with open_gguf(files[0]) as a, open_gguf(files[1]) as b:
        found = compare_values(a, b)
        assert [each.names for each in found.tensors] == [(name,) for name in SHAPES]
        squares, norms = 0.0, 0.0
        for each, (name, shape) in zip(found.tensors, SHAPES.items(), strict=True):
            exact = a.array(name).astype(np.float64)
            type_ = b.tensors[name].type
            other = b.array(name) if type_ == F32 else decode(b.blocks(name), type_)
            errors = other.reshape(shape).astype(np.float64) - exact
            assert each.rms == pytest.approx(np.sqrt((errors**2).mean()))
            assert each.relative == pytest.approx(np.linalg.norm(errors) / np.linalg.norm(exact))
            assert each.largest == np.abs(errors).max()
            assert (each.of_a, each.of_b) == (a.tensors[name].type.name, type_.name)
            squares, norms = squares + (errors**2).sum(), norms + (exact**2).sum()
        n_values = sum(int(np.prod(shape)) for shape in SHAPES.values())
        assert found.total.rms == pytest.approx(np.sqrt(squares / n_values))
        assert found.total.relative == pytest.approx(np.sqrt(squares / norms))


def test_the_command_folds_layers_and_adds_up(
    files: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["diff", "--values", *map(str, files)]
    assert main(words) == 1
    lines = capsys.readouterr().out.splitlines()
    (layers,) = (line for line in lines if line.startswith("blk.0-2.ffn_up.weight"))
    assert layers.split()[1:3] == ["F16", "Q4_0"]
    assert layers.split()[-3].rstrip(":") in ("0", "1", "2")
    assert any(line.startswith("all 5 tensors") for line in lines)
    assert lines[-1] == "1 of 5 tensors have the same values"
    assert main([*words, "--json"]) == 1
    data = json.loads(capsys.readouterr().out)
    assert data["values"].keys() == SHAPES.keys()
    assert 0.05 < data["values"]["blk.1.ffn_up.weight"]["relative"] < 0.1
    assert data["total"]["elements"] == sum(int(np.prod(shape)) for shape in SHAPES.values())
    assert {"section", "name", "a", "b"} == data["differences"][0].keys()


def test_types_that_hold_the_same_values(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """BF16 in one file and F32 in the other differ in bytes and not in values; other shapes are left out."""
    paths = tmp_path / "a.gguf", tmp_path / "b.gguf"
    for path, type_, other in zip(paths, (BF16, F32), ((2, 8), (8, 2)), strict=True):
        infos = [TensorInfo("same", (3, 8), type_), TensorInfo("another shape", other, F32)]
        layout = FileLayout.of({}, infos)
        bits = np.ones((3, 8), "<f4") if type_ == F32 else np.full((3, 8), 0x3F80, "<u2")
        with GGUFWriter(path, layout) as writer:
            writer.write(layout.offset_of("same"), bits)
            writer.write(layout.offset_of("another shape"), np.zeros(16, "<f4"))
            writer.publish()
    assert main(["diff", "--values", *map(str, paths)]) == 1
    out = capsys.readouterr().out
    assert out.splitlines()[-1] == "1 of 1 tensors have the same values"
    assert "RMS" not in out
