"""Vision towers: the files are those of llama.cpp's converter, byte for byte."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import convert
import quantize
from gguf_tools import GGUFFile, open_gguf
from gguf_tools.commands import convert as command_line
from gguf_tools.commands.main import main
from tests.support import oracle
from tests.support.checkpoints import Tensors, edit_tensors
from tests.support.oracle.towers import towers
from tests.support.towers import NAMES, recorded, write

OUTTYPES = ("f16", "bf16", "f32", "q8_0", "auto")


def described(file: GGUFFile) -> Iterator[list[Any]]:
    """Yield what is recorded of each tensor, in file order."""
    for name, info in file.tensors.items():
        yield [name, info.type.name, list(info.shape), hashlib.sha256(file.raw(name)).hexdigest()[:12]]


def keys(file: GGUFFile) -> Iterator[list[Any]]:
    """Yield what is recorded of each key, in file order."""
    for key, value in file.metadata.items():
        kinds = value.kind.name if value.item is None else f"{value.kind.name} {value.item.name}"
        plain = list(value.plain) if isinstance(value.plain, tuple) else value.plain
        yield [key, kinds, plain]


def softplus_of(facts: dict[str, Any], path: Path) -> dict[str, bytes]:
    """Return the bytes of tensors that are computed -> those recorded, which differ by rounding."""
    replaced = {}
    with open_gguf(path) as file:
        for name, numbers in facts["softplus"].items():
            ours, theirs = file.raw(name).tobytes(), np.array(numbers, np.float32)
            steps = np.frombuffer(ours, np.int32) - theirs.view(np.int32)
            assert np.abs(steps).max() <= 2, name
            replaced[ours] = theirs.tobytes()
    return replaced


@pytest.mark.parametrize("name", NAMES)
def test_equals_llama_cpps_converter(name: str, tmp_path: Path) -> None:
    facts = recorded(name)
    folder, out = write(facts, tmp_path / name), tmp_path / "out.gguf"
    for outtype in OUTTYPES:
        convert.convert(folder, out, outtype=outtype, mmproj=True, force=True)
        data = out.read_bytes()
        for ours, theirs in softplus_of(facts, out).items():
            assert data.count(ours) == 1
            data = data.replace(ours, theirs)
        out.write_bytes(data)
        if outtype == "f16":
            with open_gguf(out) as file:
                assert list(keys(file)) == facts["keys"]
                assert list(described(file)) == facts["tensors"]
        assert (outtype, hashlib.sha256(data).hexdigest()) == (outtype, facts["sha256"][outtype])


def test_gemma_3_as_transformers_5_saves_it(tmp_path: Path) -> None:
    """Without `vision_model` in the names, which llama.cpp's converter asks for."""
    facts = recorded("gemma-3")
    folder = write(facts, tmp_path / "gemma-3")

    def rename(tensors: Tensors) -> None:
        renamed = {name.replace(".vision_model.", "."): values for name, values in tensors.items()}
        assert any(name.startswith("vision_tower.head.") for name in renamed)
        tensors.clear()
        tensors.update(renamed)

    edit_tensors(folder, rename)
    convert.convert(folder, tmp_path / "out.gguf", outtype="f16", mmproj=True)
    assert hashlib.sha256((tmp_path / "out.gguf").read_bytes()).hexdigest() == facts["sha256"]["f16"]


@pytest.mark.parametrize("name", NAMES)
def test_weights_are_those_of_transformers_class(name: str) -> None:
    """A class of another version may call them otherwise, and then the recordings are of no model."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    facts = recorded(name)
    class_ = getattr(transformers, facts["config"]["architectures"][0])
    with torch.device("meta"):
        model = class_(class_.config_class(**facts["config"]))
    made = sorted((list(shape.shape) for key, shape in model.state_dict().items() if is_tower(key)), key=str)
    assert made == sorted((shape for key, shape in facts["weights"].items() if is_tower(key)), key=str)


def is_tower(name: str) -> bool:
    return not {"language_model", "lm_head"} & set(name.split("."))


@pytest.mark.skipif(not oracle.available(), reason="needs the xllamacpp wheel")
@pytest.mark.parametrize("name", NAMES)
def test_llama_cpp_loads_the_file(name: str, tmp_path: Path) -> None:
    folder = write(recorded(name), tmp_path / name)
    convert.convert(folder, tmp_path / "out.gguf", outtype="q8_0", mmproj=True)
    has_sound = name in ("gemma-4-e", "gemma-4-12b")
    assert towers(tmp_path / "out.gguf") == (True, has_sound)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write(recorded("qwen3.5"), tmp_path / "Qwen3.5-9B")
    assert command_line.main([str(folder), "--mmproj", "--outtype", "q8_0"]) == 0
    assert "text part; the file holds only the tower" in capsys.readouterr().out
    (made,) = folder.glob("*.gguf")
    assert made.name == "mmproj-Qwen3.5-9b-Q8_0.gguf"
    assert main(["audit", str(made), str(folder)]) == 0
    assert "nothing is wrong" in capsys.readouterr().out
    assert main(["verify", str(made), "--against", str(folder)]) == 0
    assert main(["show", str(made)]) == 0
    assert "qwen3vl_merger" in capsys.readouterr().out
    assert command_line.main(["--mmproj", "--print-supported-models"]) == 0
    assert "Gemma4ForConditionalGeneration" in capsys.readouterr().out
    assert command_line.main([str(folder), "--mmproj", "--card"]) == 2


@pytest.mark.parametrize("name", ["gemma-3", "gemma-4-e"])
@pytest.mark.parametrize("file_type", ["Q8_0", "Q4_K_M"])
def test_one_pass_equals_two(file_type: str, name: str, tmp_path: Path) -> None:
    folder = write(recorded(name), tmp_path / name)
    convert.convert(folder, tmp_path / "f32.gguf", outtype="f32", mmproj=True)
    quantize.quantize(tmp_path / "f32.gguf", tmp_path / "two.gguf", file_type, provenance=False)
    convert.convert(folder, tmp_path / "one.gguf", outtype=file_type, mmproj=True, provenance=False)
    assert (tmp_path / "one.gguf").read_bytes() == (tmp_path / "two.gguf").read_bytes()
    with open_gguf(tmp_path / "one.gguf") as file:
        types = {info.type.name for name, info in file.tensors.items() if ".conv1d." in name or "_dw" in name}
    # llama.cpp computes no others of those by channels.
    assert types == ({"F32"} if name == "gemma-4-e" else set())
