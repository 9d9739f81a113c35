"""A mistake on a command line is answered in one line that says what to do, before anything is written."""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import convert
import gguf_tools.commands.convert
import gguf_tools.commands.evaluate
import gguf_tools.commands.imatrix
import gguf_tools.commands.main
import gguf_tools.commands.quantize
import gguf_tools.commands.sensitivity
from gguf_tools import open_gguf
from quantize.plan.sensitivities import Sensitivities, TensorSensitivity, write_sensitivities
from tests.support.trained_model import EXAMPLE

GOLDEN = Path(__file__).parents[1] / "golden"
LINES = [
    line.split(" | ", 2)
    for line in (GOLDEN / "mistakes" / "mistakes.txt").read_text().splitlines()
    if not line.startswith("#")
]
MAINS: dict[str, Callable[[list[str]], int]] = {
    "quantize": gguf_tools.commands.quantize.main, "convert-hf-to-gguf": gguf_tools.commands.convert.main,
    "imatrix": gguf_tools.commands.imatrix.main, "evaluate": gguf_tools.commands.evaluate.main,
    "sensitivity": gguf_tools.commands.sensitivity.main, "gguf-tools": gguf_tools.commands.main.main,
}  # fmt: skip


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a folder with the files that the commands name."""
    folder = tmp_path_factory.mktemp("mistakes")
    shutil.copytree(EXAMPLE, folder / "model")
    convert.convert(EXAMPLE, folder / "in.gguf", outtype="bf16")
    shutil.copy(folder / "in.gguf", folder / "q4.gguf")
    shutil.copy(GOLDEN / "imatrix" / "tiny-deepseek-v3.imatrix.gguf", folder / "m.imatrix.gguf")
    with open_gguf(folder / "in.gguf") as file:
        shapes = {info.name: info.shape for info in file.tensors.values() if len(info.shape) > 1}
    damage = {"Q4_0": 0.02, "Q8_0": 0.001}
    tensors = {name: TensorSensitivity(shape, damage) for name, shape in shapes.items()}
    write_sensitivities(Sensitivities(tensors), folder / "losses.json")
    text = (EXAMPLE / "calibration.txt").read_text()[:100_000]
    for name, content in (
        ("text.txt", text), ("empty.txt", ""), ("short.txt", "hi\n"),
        ("typo.yaml", "file_type: Q9\n"), ("odd-key.yaml", "file_type: Q4_0\ntensor_type: []\n"),
    ):  # fmt: skip
        (folder / name).write_text(content)
    (folder / "utf16.txt").write_text("a text\n" * 500, "utf-16")
    (folder / "bytes.txt").write_bytes(bytes(range(256)) * 50)
    (folder / "latin.txt").write_bytes(b"caf\xe9\n" * 500)
    return folder


def test_there_are_enough() -> None:
    assert len(LINES) >= 170
    assert len({command for _, command, _ in LINES}) == len(LINES)
    assert {command.split()[0] for _, command, _ in LINES} == set(MAINS)


@pytest.mark.parametrize(("code", "command", "line"), LINES, ids=[command for _, command, _ in LINES])
def test_a_mistake(
    code: str, command: str, line: str, files: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(files)
    before = {path: path.stat().st_mtime_ns for path in files.iterdir()}
    program, *words = shlex.split(command)
    assert MAINS[program](words) == int(code)
    said = capsys.readouterr()
    told = re.sub(r" \([^()]* --help explains\)$", "", said.err.rstrip("\n"))
    assert told.partition(": error: ")[2] == line
    assert said.err.count("\n") == 1
    assert {path: path.stat().st_mtime_ns for path in files.iterdir()} == before
