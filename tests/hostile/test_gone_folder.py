"""A working directory that is gone: what names files from the root works, the rest ends in one line."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import gguf_tools
from gguf_tools.commands.convert import main as convert
from gguf_tools.commands.evaluate import main as evaluate
from gguf_tools.commands.imatrix import main as imatrix
from gguf_tools.commands.main import main
from gguf_tools.commands.quantize import main as quantize
from gguf_tools.commands.sensitivity import main as sensitivity
from gguf_tools.errors import ToolkitError
from tests.quantize.model_files import write_mixture_model
from tests.support.trained_model import EXAMPLE

GONE = "the working directory was removed; change to an existing one"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "in.gguf"
    write_mixture_model(path)
    return path


@pytest.fixture
def gone(model: Path, tmp_path: Path) -> Iterator[Path]:
    """Work in a folder that is gone; give one with a model."""
    (tmp_path / "in.gguf").symlink_to(model)
    (tmp_path / "text.txt").write_text("Some words. " * 400)
    (tmp_path / "gone").mkdir()
    before = Path.cwd()
    os.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    try:
        yield tmp_path
    finally:
        os.chdir(before)


def test_paths_from_the_root_do(gone: Path) -> None:
    assert quantize([str(gone / "in.gguf"), str(gone / "out.gguf"), "Q4_0", "-q"]) == 0
    gguf_tools.quantize(gone / "in.gguf", gone / "other.gguf", "Q4_0")
    assert (gone / "other.gguf").read_bytes() == (gone / "out.gguf").read_bytes()
    assert main(["clean", str(gone), "--remove"]) == 0
    assert main(["show", str(gone / "out.gguf"), "-q"]) in (0, 2)


Command = Callable[[list[str]], int]


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (quantize, ["{model}", "out.gguf", "Q4_0"]),
        (convert, [str(EXAMPLE), "--outfile", "out.gguf"]),
        (imatrix, ["-m", "{model}", "-f", "{text}", "-o", "out.gguf"]),
        (imatrix, ["-m", "{model}", "-f", "{text}", "-o", "{folder}/out.gguf"]),
        (evaluate, ["{model}", "-f", "{text}", "{model}"]),
        (sensitivity, ["{model}", "-f", "{text}", "-o", "out.json"]),
        (main, ["cook", str(EXAMPLE), "-f", "{text}", "--types", "Q4_0", "-o", "out"]),
        (main, ["refine", "{model}", "--base", "{model}", "-f", "{text}", "-o", "out.gguf"]),
        (main, ["split", "{model}", "out"]),
    ],
)
def test_others_say_so(
    command: Command, words: list[str], gone: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = {"model": gone / "in.gguf", "text": gone / "text.txt", "folder": gone}
    assert command([each.format(**names) for each in words]) == 1
    err = capsys.readouterr().err
    assert (err.count("\n"), GONE in err) == (1, True), err


def test_in_python(gone: Path) -> None:
    model = gone / "in.gguf"
    for call in (
        lambda: gguf_tools.quantize(model, "out.gguf", "Q4_0"),
        lambda: gguf_tools.convert(EXAMPLE, "out.gguf"),
        lambda: gguf_tools.split(model, "out", max_tensors=2),
        lambda: gguf_tools.evaluate(model, gone / "text.txt", [model]),
        lambda: gguf_tools.card([model], output="README.md"),
    ):
        with pytest.raises(ToolkitError, match=GONE):
            call()
