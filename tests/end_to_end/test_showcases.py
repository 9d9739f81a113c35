"""What people read from top to bottom: the notebook and a maker's day do what they show."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

from tests.support.hub_server import HubServer
from tests.support.trained_model import EXAMPLE

EXAMPLES = Path(__file__).parents[2] / "examples"
NOTEBOOK = EXAMPLES / "from_checkpoint_to_card.ipynb"


def module(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


@pytest.fixture
def texts(tmp_path: Path) -> tuple[str, str]:
    lines = (EXAMPLE / "calibration.txt").read_text()
    for name, text in (("learn.txt", lines[:20_000]), ("measure.txt", lines[-20_000:])):
        (tmp_path / name).write_text(text)
    return str(tmp_path / "learn.txt"), str(tmp_path / "measure.txt")


def test_the_notebook_is_stored_without_its_outputs() -> None:
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    assert {cell["cell_type"] for cell in cells} == {"markdown", "code"}
    assert [cell for cell in cells if cell.get("outputs") or cell.get("execution_count")] == []


@pytest.mark.slow
def test_the_notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    for name in ("ipykernel", "pandas", "matplotlib"):
        pytest.importorskip(name)
    monkeypatch.setenv("NOTEBOOK_MODEL", str(EXAMPLE))
    monkeypatch.setenv("PYTHONPATH", str(EXAMPLES.parent))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbclient.NotebookClient(notebook, timeout=600, kernel_name="python3").execute()
    shown = json.dumps([cell.get("outputs") for cell in notebook.cells])
    assert "image/svg+xml" in shown
    assert "tiny-Q3_K_M-calibrated.gguf" in shown
    assert "## How to run them" in shown


@pytest.mark.slow
def test_a_maker_s_day(texts: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    day = module(EXAMPLES / "a_makers_day.py").day
    with HubServer({}) as server, server.client(tmp_path / "cache", HF_TOKEN="hf_mine"):
        server.uploads = tmp_path / "uploads"
        server.tokens.add("hf_mine")
        day(str(EXAMPLE), *texts, tmp_path / "day", 2, 64, "me/tiny-GGUF")
        names = {path.name for path in server.models["me/tiny-GGUF"].iterdir()}
        quants = {f"model-{name}.gguf" for name in ("Q2_K", "Q8_0", "Q3_K_M-calibrated", "3.4bpw")}
        assert {*quants, "README.md", "model.evaluation.svg", "model.imatrix.gguf"} <= names
        lines = capsys.readouterr().out.splitlines()
        assert len([line for line in lines if " KLD " in line]) == 7
        card = (tmp_path / "day" / "README.md").read_text()
        assert "hf download me/tiny-GGUF model-Q4_K_M.gguf" in card
        made = {path: path.stat().st_mtime_ns for path in (tmp_path / "day").glob("*.gguf")}
        day(str(EXAMPLE), *texts, tmp_path / "day", 2, 64, None)  # what is there is not made again
        assert {path: path.stat().st_mtime_ns for path in made} == made
