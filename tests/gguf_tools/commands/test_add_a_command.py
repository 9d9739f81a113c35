"""The command of docs/add-a-command.md, taken out of the page, registered and run."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

import gguf_tools.commands.main
from gguf_tools.commands.roof import COMMANDS, Command
from tests.gguf_tools.sample_files import TENSORS, write_file

PAGE = Path(__file__).parents[3] / "docs" / "add-a-command.md"


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    page = PAGE.read_text(encoding="utf-8")
    code, row = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    module = ModuleType("gguf_tools.commands.largest")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(compile(code, PAGE, "exec"), vars(module))
    monkeypatch.setattr(gguf_tools.commands.main, "COMMANDS", (*COMMANDS, eval(row, {"Command": Command})))
    return module


def test_it_runs_under_both_names(
    registered: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_file(tmp_path / "a.gguf")
    words = ["-n", "2", str(tmp_path / "a.gguf")]
    assert registered.main(words) == 0
    alone = capsys.readouterr().out
    sizes = sorted((info.n_bytes for info in TENSORS), reverse=True)
    assert [int(line.split()[0].replace(",", "")) for line in alone.splitlines()] == sizes[:2]
    assert gguf_tools.commands.main.main(["largest", *words]) == 0
    assert capsys.readouterr().out == alone


def test_its_errors_are_one_line(registered: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert registered.main(["none.gguf"]) == 1
    assert capsys.readouterr().err.startswith("largest: error: none.gguf: ")
    assert gguf_tools.commands.main.main(["largest", "-n", "0", "none.gguf"]) == 2
    assert capsys.readouterr().err.startswith("gguf-tools largest: error: ")


def test_it_is_listed_and_completed(capsys: pytest.CaptureFixture[str]) -> None:
    assert gguf_tools.commands.main.main(["--help"]) == 0
    assert "list the largest tensors" in capsys.readouterr().out
    assert {"largest", "gguf-tools largest"} <= {*gguf_tools.commands.main.parsers()}
