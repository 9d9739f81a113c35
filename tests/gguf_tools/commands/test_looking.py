"""`show`, `diff`, `verify` and `scan` as functions: their results say what the commands print."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import gguf_tools as gt
from gguf_tools.commands.main import main
from gguf_tools.text import json_text
from tests.contract.import_graph import ROOT
from tests.gguf_tools.sample_files import METADATA, write_file


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write_file(tmp_path / "a.gguf")
    return tmp_path / "a.gguf"


@pytest.fixture
def other(tmp_path: Path) -> Path:
    write_file(tmp_path / "b.gguf", METADATA | {"new": gt.Value.u8(1)}, seed=1)
    return tmp_path / "b.gguf"


CALLS: dict[str, Callable[[Path, Path], Any]] = {
    "show": lambda a, b: gt.show(a),
    "diff": lambda a, b: gt.diff(a, b),
    "verify": lambda a, b: gt.verify(a),
    "scan": lambda a, b: gt.scan(a, data=True),
}


@pytest.mark.parametrize("name", CALLS)
def test_results_are_what_the_commands_print(
    name: str, path: Path, other: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = CALLS[name](path, other)
    words = [name, str(path), *([str(other)] if name == "diff" else ["--data"] if name == "scan" else [])]
    main(words)
    assert capsys.readouterr().out.splitlines() == list(result.lines())
    main([*words, "--json"])
    data = result.to_json()["differences"] if name == "diff" else result.to_json()
    assert json.loads(capsys.readouterr().out) == json.loads(json_text(data))


def test_a_description_outlives_its_file(path: Path) -> None:
    found = gt.show(path)
    path.unlink()
    assert (found.path, found.endian, found.missing) == (path, "little", "")
    assert found.tensor_bytes == sum(each.n_bytes for each in found.tensors.values())
    assert "tensors" in repr(found)
    assert "<table>" in found._repr_html_()
    file, offset = next(iter(found.places.values()))
    assert file == path
    assert offset % found.alignment == 0


def test_fields_say_what_differs(path: Path, other: Path) -> None:
    result = gt.diff(path, other, data=False, values=True)
    assert [(each.section, each.name) for each in result.found] == [("metadata", "new")]
    assert result.errors is not None
    assert result.errors.total.relative > 0
    assert gt.diff(path, path).found == ()


def test_progress_counts_the_data(path: Path, other: Path) -> None:
    for call in (
        lambda tell: gt.verify(path, progress=tell),
        lambda tell: gt.diff(path, other, progress=tell),
        lambda tell: gt.scan(path, data=True, progress=tell),
    ):
        states: list[gt.ProgressState] = []
        call(states.append)
        assert states[-1].share == 1
        assert len(states) > 2


def test_what_is_bad(path: Path, other: Path, tmp_path: Path) -> None:
    assert gt.verify(path, against=path).bad == []
    assert gt.verify(path, against=other).bad != []
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(path.read_bytes()[:-64])
    with pytest.raises(gt.TruncatedError):
        gt.scan(cut)
    with open(path, "ab") as file:
        file.write(b"MZ" + bytes(100))
    report = gt.scan(path)
    assert report.is_bad(strict=True)
    assert report.findings[0].level >= gt.Level.WARNING


def test_no_module_takes_the_place_of_a_function() -> None:
    """A module of the package is its attribute once it is imported, whatever the stub says of the name."""
    functions = [name for name in gt.__all__ if callable(getattr(gt, name))]
    modules = {path.stem for path in (ROOT / "gguf_tools").iterdir()}
    assert [name for name in functions if name in modules] == []
