"""Hostile GGUF files, read within limits, and given to the commands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gguf_tools.commands.main import main as gguf_tools
from gguf_tools.commands.quantize import main as quantize
from gguf_tools.format.reader import GGUFFile
from tests.hostile.fields import head, tensor
from tests.hostile.gguf_cases import CASES, Case
from tests.hostile.warden import Warden

REFUSED = [name for name, case in CASES.items() if case.says is not None]
SHORT = [name for name, case in CASES.items() if not case.total_bytes]
COMMANDS = {
    "show": lambda path: gguf_tools(["show", path]),
    "show --json": lambda path: gguf_tools(["show", "--json", "--full", path]),
    "verify": lambda path: gguf_tools(["verify", path]),
    "hash": lambda path: gguf_tools(["hash", path]),
    "diff": lambda path: gguf_tools(["diff", path, path]),
    "quantize --dry-run": lambda path: quantize(["--dry-run", path, "Q8_0"]),
}


def write(folder: Path, case: Case) -> Path:
    path = folder / "strange.gguf"
    with path.open("wb") as file:
        file.writelines(case.fields)
        if case.total_bytes:
            file.truncate(case.total_bytes)
    return path


@pytest.mark.parametrize("name", CASES)
def test_file_is_refused_in_one_line_or_opened(warden: Warden, tmp_path: Path, name: str) -> None:
    case = CASES[name]
    outcome = warden.read("gguf", write(tmp_path, case))
    if case.says is None:
        assert outcome.how == "opened", outcome
        return
    assert outcome.how == "refused", outcome
    assert re.search(case.says, outcome.text), outcome
    assert outcome.text.isprintable()
    assert len(outcome.text) < 500


def test_a_terabyte_of_data_is_not_read_to_open_it(tmp_path: Path) -> None:
    fields = b"".join((*head(1), *tensor("t", (2**38,))))
    with GGUFFile(write(tmp_path, Case((fields,), None, 2**40 + 4096))) as file:
        assert file.tensor("t").n_bytes == 2**40
        assert file.read_rows("t", 0, 0).size == 0


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("name", SHORT)
def test_command_ends_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str, name: str
) -> None:
    code = COMMANDS[command](str(write(tmp_path, CASES[name])))
    out, err = capsys.readouterr()
    assert code in (0, 1)
    if name in REFUSED:
        assert code == 1
        assert out == ""
    if name in REFUSED or (command == "quantize --dry-run" and code):
        assert err.count("\n") == 1
        assert err.rstrip("\n").isprintable()
        assert len(err) < 1000
