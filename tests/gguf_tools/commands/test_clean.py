"""What interrupted runs have left is found by its marks, and removed unless a run holds it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import gguf_tools
from gguf_tools.commands.main import main
from gguf_tools.system.locks import try_lock
from tests.support.trained_model import EXAMPLE


def interrupted(folder: Path) -> Path:
    """Leave what a run leaves that is interrupted after its first chunk; return the output."""

    def stop(state: gguf_tools.ProgressState) -> None:
        if state.done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as raised:
        gguf_tools.quantize(EXAMPLE, folder / "out.gguf", "Q8_0", progress=stop)
    assert "done and kept: the same command resumes from there" in raised.value.__notes__[0]
    return folder / "out.gguf"


def listed(folder: Path, capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    assert main(["clean", str(folder), "--json", *words]) == 0
    return [Path(each["path"]).name for each in json.loads(capsys.readouterr().out)]


def test_what_a_run_has_left_is_listed_and_removed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "inner").mkdir()
    output = interrupted(tmp_path / "inner")
    strangers = {"x.partial": b"a stranger's", "y.journal": b"a diary", "z.work": b"a file"}
    for name, data in strangers.items():
        (tmp_path / name).write_bytes(data)
    ours = ["out.gguf.journal", "out.gguf.partial"]
    assert listed(tmp_path, capsys) == ours
    assert listed(output, capsys) == ours
    assert main(["clean", str(tmp_path)]) == 0
    assert "2 leftovers, " in capsys.readouterr().out
    with open(output.with_name("out.gguf.journal"), "rb+") as journal:
        try_lock(journal.fileno())
        assert main(["clean", str(tmp_path), "--remove"]) == 0
        said = capsys.readouterr().out
        assert said.count("in use by a run") == 2
        assert said.endswith("found no leftovers of ended runs\n")
    assert listed(tmp_path, capsys, "--remove") == ours
    assert sorted(path.name for path in tmp_path.rglob("*") if path.is_file()) == [*strangers]
    assert main(["clean", str(tmp_path)]) == 0
    assert capsys.readouterr().out == "found no leftovers of ended runs\n"


def test_a_path_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["clean", str(tmp_path / "none.gguf")]) == 1
    assert "none.gguf: no such file or folder" in capsys.readouterr().err
