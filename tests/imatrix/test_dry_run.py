"""A dry run of what computes a model tells what a run takes, refuses what it refuses, and writes nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import gguf_tools.commands.evaluate
import gguf_tools.commands.imatrix
import gguf_tools.commands.main
import gguf_tools.commands.sensitivity
from tests.support.trained_model import EXAMPLE

Main = Callable[[list[str]], int]

COMMANDS: dict[str, tuple[Main, str]] = {
    "importances": (gguf_tools.commands.imatrix.main, "-m MODEL -o out.gguf"),
    "evaluation": (gguf_tools.commands.evaluate.main, "MODEL MODEL --json out.json"),
    "sensitivities": (gguf_tools.commands.sensitivity.main, "MODEL -o out.json"),
    "refinement": (gguf_tools.commands.main.main, "refine FILE --base MODEL -o out.gguf --steps 1"),
}


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import convert

    path = tmp_path_factory.mktemp("dry") / "q4.gguf"
    convert.convert(EXAMPLE, path, outtype="Q4_0")
    return path


@pytest.mark.parametrize("what", COMMANDS)
def test_it_tells_three_things_and_writes_nothing(
    what: str, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    main, words = COMMANDS[what]
    argv = words.replace("MODEL", str(EXAMPLE)).replace("FILE", str(file)).split()
    text = ["-f", str(EXAMPLE / "calibration.txt"), "-c", "64", "--chunks", "16", "-t", "1", "--dry-run"]
    assert main([*argv, *text]) == 0
    first, *lines = capsys.readouterr().out.splitlines()
    assert first == f"{what}: 1,024 tokens in 16 chunks"
    assert [line.split()[0] for line in lines] == ["memory", "disk", "time"]
    assert not list(tmp_path.iterdir())
    assert main([*argv, *text, "-c", "1000000"]) == 1
    assert "expected a chunk of 1000000 or more" in capsys.readouterr().err
