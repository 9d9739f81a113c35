"""Outputs of `evaluate`: what a kill between two of them leaves; and inputs that are refused first."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

import gguf_tools.files.named_files
from gguf_tools.commands.evaluate import main
from quantize.plan.sensitivities import Sensitivities, TensorSensitivity, write_sensitivities

pytest.importorskip("torch")
pytest.importorskip("matplotlib")

Made = Callable[[str], Path]


@pytest.fixture
def words(made: Made, text: Path) -> list[str]:
    """A command that measures one file."""
    return [
        str(made("F32")),
        str(made("Q8_0")),
        "-f",
        str(text),
        "-c",
        "64",
        "--chunks",
        "2",
        "--threads",
        "1",
    ]


@pytest.fixture
def no_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail when a layer is computed."""

    def computed(*_: object) -> None:
        raise AssertionError("a layer was computed")

    monkeypatch.setattr("imatrix.evaluate.bases.base.Lockstep.run", computed)


@pytest.mark.parametrize(
    ("killed_at", "work"),
    [
        pytest.param(".html", [], marks=pytest.mark.slow),
        pytest.param(".html", ["--work", "W"], marks=pytest.mark.slow),
        (".json", ["--work", "W", "--keep", "K"]),
    ],
    ids=str,
)
def test_a_run_that_is_killed_between_its_outputs_goes_on(
    work: list[str], killed_at: str, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    outputs = ["--json", "e.json", "--html", "e.html"]
    write = gguf_tools.files.named_files.write_whole

    def killed(path: Path, data: bytes) -> None:
        if path.suffix == killed_at and path.stem == "e":
            raise KeyboardInterrupt
        write(path, data)

    with monkeypatch.context() as patched:
        patched.setattr("gguf_tools.files.named_files.write_whole", killed)
        assert main([*words, *outputs, *work]) == 130
    assert (tmp_path / "e.json").exists() == (killed_at == ".html")
    capsys.readouterr()
    assert main([*words, *outputs, *work]) == 0
    assert "resuming after" in capsys.readouterr().err
    kept = ["K"] if "K" in work else []
    assert sorted(path.name for path in tmp_path.iterdir()) == [*kept, "e.html", "e.json"]
    assert main([*words, *outputs, *work]) == 1
    assert "exists already" in capsys.readouterr().err


def test_a_folder_of_somebody_else_does_not_stand_for_an_unfinished_run(
    words: list[str], no_layer: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "e.json").write_text("mine")
    assert main([*words, "--json", str(tmp_path / "e.json"), "--work", str(tmp_path)]) == 1
    assert "e.json: exists already; --force replaces it" in capsys.readouterr().err
    assert (tmp_path / "e.json").read_text() == "mine"


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"n_chunks": 9}, "measured on 9 chunks of the text, here 2"),
        ({"chunk_size": 32}, "measured on another context"),
        ({"sha256": "0"}, "measured on another text"),
    ],
)
def test_earlier_evaluations_are_looked_at_first(
    change: dict[str, object], complaint: str, words: list[str], tmp_path: Path, no_layer: None,
    capsys: pytest.CaptureFixture[str], text: Path,
) -> None:  # fmt: skip
    earlier = written_earlier(tmp_path / "stock.json", text, **change)
    page = ["--html", str(tmp_path / "e.html"), "--compare-with", str(earlier)]
    assert main([*words, *page]) == 1
    err = capsys.readouterr().err
    assert (complaint in err, err.count("\n")) == (True, 1)


def test_losses_are_looked_at_first(
    words: list[str], tmp_path: Path, no_layer: None, capsys: pytest.CaptureFixture[str]
) -> None:
    other = {"blk.99.ffn_down.weight": TensorSensitivity((64, 64), {"Q4_0": 0.1})}
    write_sensitivities(Sensitivities(other, model={}, text={}), tmp_path / "losses.json")
    page = ["--html", str(tmp_path / "e.html"), "--losses", str(tmp_path / "losses.json")]
    assert main([*words, *page]) == 1
    assert "has losses, but the file lacks this tensor; were they measured on" in capsys.readouterr().err


def test_a_page_is_made_without_an_evaluation_of_another_base(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], text: Path
) -> None:
    earlier = written_earlier(tmp_path / "stock.json", text, ppl=1e6)
    page = tmp_path / "e.html"
    assert main([*words, "--html", str(page), "--compare-with", str(earlier)]) == 1
    found = capsys.readouterr()
    assert f"wrote {page}" in found.out
    assert "stock.json: measured against another base (PPL 1000000.0000" in found.err
    assert "e.html.work" not in [path.name for path in tmp_path.iterdir()]


def test_an_output_that_is_a_folder_is_refused(
    words: list[str], no_layer: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*words, "--json", str(tmp_path)]) == 1
    assert f"{tmp_path}: is a folder, expected a file to write" in capsys.readouterr().err


def written_earlier(path: Path, text: Path, **change: object) -> Path:
    """Write an evaluation of the same text, but for `change`, and return its path."""
    import hashlib

    ppl = change.pop("ppl", 20.0)
    sha256 = hashlib.sha256(text.read_bytes()).hexdigest()
    sizes = {"n_chunks": 2, "chunk_size": 64, "n_tokens_measured": 62}
    about = {"path": str(text), "sha256": sha256, **sizes}
    kld = {"mean": 0.1, "error": 0.01, "p99": 0.5}
    models = [{"path": "x-Q4_K.gguf", "n_bytes": 5, "ppl": 20.5, "kld": kld, "same_top": 0.9}]
    path.write_text(json.dumps({"text": {**about, **change}, "base": {"ppl": ppl}, "models": models}))
    return path


def test_quantize_looks_at_the_text_to_evaluate_on_first(
    made: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from gguf_tools.commands.quantize import main

    short = tmp_path / "short.txt"
    short.write_text("a few words")
    assert main(["--evaluate", str(short), str(made("F32")), str(tmp_path / "o.gguf"), "Q8_0"]) == 1
    assert "short.txt: 5 tokens, expected a chunk of 512 or more" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["short.txt"]
