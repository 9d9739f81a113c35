"""Texts of nonsense: refused before anything is computed or written, and with --force never in silence."""

from __future__ import annotations

from pathlib import Path

import pytest

import convert
import gguf_tools
from gguf_tools.errors import BadRequest
from tests.support.trained_model import calibration_text, trained_model

pytest.importorskip("torch")

import imatrix
import quantize
from gguf_tools.commands.evaluate import main as evaluate_main
from gguf_tools.commands.imatrix import main as imatrix_main
from gguf_tools.commands.quantize import main as quantize_main
from gguf_tools.commands.sensitivity import main as sensitivity_main
from imatrix.calibrate.statistics.conditions import Trust
from imatrix.texts.quality import judge
from imatrix.texts.tokens import Cut, cut_into_chunks
from quantize.rounding.factor import DAMP

NONSENSE = {
    "token": "the " * 4000,
    "newlines": "\n" * 8000,
    "spaces": " " * 64000,
    "eos": "<｜end▁of▁sentence｜>" * 800,
    "two": "yes no " * 2000,
    "copies": "All work and no play makes Jack a dull boy, said the man who typed it.\n" * 400,
}
SMALL = ("-c", "32", "--chunks", "4")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    convert.convert(trained_model(folder), folder / "base.gguf", outtype="f32")
    return folder / "base.gguf"


@pytest.fixture
def nonsense(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    path = tmp_path / "nonsense.txt"
    path.write_text(NONSENSE[getattr(request, "param", "newlines")], encoding="utf-8")
    return path


def left(folder: Path) -> list[str]:
    """Return the names of what a command has left beside the text."""
    return sorted(path.name for path in folder.iterdir() if path.name != "nonsense.txt")


@pytest.mark.parametrize("nonsense", NONSENSE, indirect=True)
def test_every_command_that_learns_refuses(
    base: Path, nonsense: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, out = str(nonsense), str(tmp_path / "out")
    for main, words in (
        (quantize_main, ["--calibrate", text, str(base), out, "Q2_K"]),
        (quantize_main, ["--calibrate", text, "--dry-run", str(base), out, "Q2_K"]),
        (quantize_main, ["--size", "4bpw", "--sensitivity-text", text, str(base), out]),
        (imatrix_main, ["-m", str(base), "-f", text, "-o", out, "--parse-special"]),
        (sensitivity_main, [str(base), "-f", text, "-o", out]),
    ):
        assert main(words) == 1
        error = capsys.readouterr().err
        assert "nonsense.txt: the text" in error
        assert "--force uses it" in error
        assert error.count("\n") == 1
    assert left(tmp_path) == []


def test_the_python_functions_refuse(base: Path, nonsense: Path, tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match="monotonous"):
        imatrix.collect(base, nonsense, tmp_path / "out.gguf")
    with pytest.raises(BadRequest, match="monotonous"):
        quantize.quantize(base, tmp_path / "out.gguf", "Q2_K", calibration=gguf_tools.Calibration(nonsense))
    assert left(tmp_path) == []


def test_forced_importances_are_told_even_quietly(
    base: Path, nonsense: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["-q", "--force", "-m", str(base), "-f", str(nonsense), "-o", str(tmp_path / "out.gguf"), *SMALL]
    assert imatrix_main(words) == 0
    shown = capsys.readouterr()
    assert "warning: " in shown.err
    assert "can be worse than a file made without it" in shown.err
    assert left(tmp_path) == ["out.gguf"]


@pytest.mark.slow
def test_a_forced_calibration_says_at_its_end_that_nothing_is_proven(
    base: Path, nonsense: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--force", "--calibrate", str(nonsense), "--one-sided", "--no-embedding", *SMALL]
    assert quantize_main([*words, str(base), str(tmp_path / "out.gguf"), "Q2_K", "2"]) == 0
    shown = capsys.readouterr()
    assert "warning: " in shown.err
    assert "warning: rows that were held back are like all others" in shown.out


def test_an_evaluation_on_nonsense_is_told(
    base: Path, nonsense: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert evaluate_main([str(base), "-f", str(nonsense), *SMALL, str(base)]) == 0
    assert "these numbers say nothing of ordinary texts" in capsys.readouterr().err


def test_a_thin_text_is_told_and_used(base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text.txt"
    text.write_bytes(calibration_text()[:2000])
    assert imatrix_main(["-m", str(base), "-f", str(text), "-o", str(tmp_path / "out.gguf"), *SMALL]) == 0
    shown = capsys.readouterr()
    assert "the text is thin: 128 tokens" in shown.err
    assert "note: the text is thin" in shown.out
    words = ["-q", "--force", "-m", str(base), "-f", str(text), "-o", str(tmp_path / "out.gguf"), *SMALL]
    assert imatrix_main(words) == 0
    assert capsys.readouterr().err == ""


def test_moments_that_nothing_proves_are_trusted_less() -> None:
    def trust(tokens: list[int], chunk_size: int) -> Trust:
        text = cut_into_chunks(tokens, None, 4000, Cut(chunk_size), "")
        return Trust.of(text, judge(text))

    words = [number * number % 3989 for number in range(10000)]
    much = trust(words, 32)
    little, one_chunk, nonsense = trust(words[:640], 32), trust(words, 10000), trust([7] * 10000, 32)
    assert much == little == Trust()
    assert one_chunk == nonsense == Trust(is_proven=False)


def test_the_fewer_tokens_a_column_has_the_more_its_moments_are_damped() -> None:
    by_tokens = [Trust().input_damp(256 * each, 256) for each in (1000, 20, 10, 1)]
    assert by_tokens == sorted(by_tokens)
    assert by_tokens[0] == DAMP
    assert DAMP < by_tokens[1] < by_tokens[2] < by_tokens[3] == 0.1
    assert Trust().input_damp(0, 256) == Trust(False).input_damp(256000, 256) == 0.1


@pytest.mark.slow
def test_a_large_text_is_told_with_its_time_and_with_what_would_do(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text.txt"
    text.write_bytes(calibration_text())
    words = ["--dry-run", "--summary", "--calibrate", str(text)]
    assert quantize_main([*words, str(base), "Q2_K", "2"]) == 0
    shown = capsys.readouterr().out
    assert "note: the text has 165 chunks, which take about" in shown
    assert "--chunks 64 shows every matrix as many tokens as it has columns" in shown
    assert quantize_main([*words, "--chunks", "165", str(base), "Q2_K", "2"]) == 0
    shown = capsys.readouterr().out
    assert "--chunks 64" not in shown
    assert "tokens for each" not in shown


@pytest.mark.slow
def test_a_little_text_and_one_in_one_script_are_told_before_and_during_a_run(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text.txt"
    text.write_bytes(calibration_text()[:20000])
    words = ["--calibrate", str(text), "--chunks", "2"]
    assert quantize_main(["--dry-run", "--summary", *words, str(base), "Q2_K", "2"]) == 0
    planned = capsys.readouterr().out
    assert quantize_main([*words, str(base), str(tmp_path / "out.gguf"), "Q2_K", "2"]) == 0
    run = "".join(capsys.readouterr())
    for shown in (planned, run):
        assert "the text has 1.3 tokens for each of the 768 columns of blk.0.ffn_down" in shown
        assert "48 chunks have 32" in shown
        assert "% of the text's letters are Latin: in other scripts" in shown


@pytest.mark.slow
def test_one_chunk_makes_no_worse_file_than_stock(base: Path, tmp_path: Path) -> None:
    text, other = tmp_path / "text.txt", tmp_path / "other.txt"
    text.write_bytes(calibration_text()[:4000])
    other.write_bytes(calibration_text()[-20000:])
    files = [tmp_path / "stock.gguf", tmp_path / "out.gguf"]
    quantize.quantize(base, files[0], "Q2_K")
    quantize.quantize(base, files[1], "Q2_K", calibration=gguf_tools.Calibration(text, Cut(128, n_chunks=1)))
    options = gguf_tools.EvaluateOptions(cut=Cut(256, n_chunks=4))
    done = gguf_tools.evaluate(base, other, files, options)
    stock, calibrated = (model.divergence.kld.mean.value for model in done.models)
    assert calibrated < 0.8 * stock


@pytest.mark.slow
@pytest.mark.parametrize("nonsense", ["spaces", "newlines"], indirect=True)
def test_forced_nonsense_makes_no_worse_file_than_stock(base: Path, nonsense: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.txt"
    other.write_bytes(calibration_text()[-20000:])
    files = [tmp_path / "stock.gguf", tmp_path / "out.gguf"]
    quantize.quantize(base, files[0], "Q2_K")
    calibration = gguf_tools.Calibration(nonsense, Cut(128, n_chunks=8), any_text=True)
    quantize.quantize(base, files[1], "Q2_K", calibration=calibration)
    done = gguf_tools.evaluate(base, other, files, gguf_tools.EvaluateOptions(cut=Cut(256, n_chunks=4)))
    stock, calibrated = (model.divergence.kld.mean for model in done.models)
    assert calibrated.value < stock.value + 2 * stock.error
