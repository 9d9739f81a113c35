"""Evaluating a file as its maker would: llama-perplexity's numbers, and a run that is killed."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import gguf_tools
import imatrix
import quantize
from imatrix.forward.open import open_model
from imatrix.forward.options import ForwardOptions
from imatrix.texts.spelling import spelled
from imatrix.texts.tokens import Cut, make_encoder
from tests.end_to_end.conftest import GOLDEN
from tests.support.trained_model import calibration_text

pytest.importorskip("torch")


def printed(name: str, file_type: str = "Q2_K") -> float:
    """Return a number that llama-perplexity has printed for a file type."""
    statistics = (GOLDEN / "quality" / f"{file_type}.txt").read_text()
    found = re.search(rf"^{re.escape(name)} *: *(-?[\d.]+)", statistics, re.MULTILINE)
    assert found is not None
    return float(found[1])


def test_measures_are_near_those_of_llama_perplexity(
    tiny_folder: Path, tiny_gguf: Callable[[str], Path], tmp_path: Path
) -> None:
    """Perplexity of the base to all its digits; the rest but for activations, which llama.cpp rounds."""
    matrix = imatrix.load(GOLDEN / "imatrix" / "tiny-deepseek-v3.imatrix.gguf")
    quantize.quantize(tiny_gguf("f32"), tmp_path / "q.gguf", "Q2_K", importances=matrix)
    (tmp_path / "t.txt").write_bytes(calibration_text()[-70000:])
    options = gguf_tools.EvaluateOptions(cut=Cut(512, n_chunks=12))
    evaluation = gguf_tools.evaluate(tiny_folder, tmp_path / "t.txt", [tmp_path / "q.gguf"], options)
    assert (evaluation.alone.text.n_chunks, evaluation.alone.text.n_tokens_measured) == (12, 3060)
    assert evaluation.alone.base_ppl.value == pytest.approx(printed("Mean PPL(base)"), rel=2e-5)
    assert evaluation.alone.base_ppl.error == pytest.approx(1.318754, rel=2e-5)
    found = evaluation.models[0].divergence
    assert found.ppl.value == pytest.approx(printed("Mean PPL(Q)"), rel=1e-3)
    assert found.kld.mean.value == pytest.approx(printed("Mean    KLD"), rel=0.01)
    assert found.kld.percentiles["median"] == pytest.approx(printed("Median  KLD"), rel=0.02)
    assert found.kld.percentiles["p90"] == pytest.approx(printed("90.0%   KLD"), rel=0.02)
    assert 100 * found.correlation == pytest.approx(printed("Cor(ln(PPL(Q)), ln(PPL(base)))"), abs=0.02)
    assert 100 * found.rms_delta_p.value == pytest.approx(printed("RMS Δp"), rel=0.01)
    assert 100 * found.same_top.value == pytest.approx(printed("Same top p"), abs=0.3)


@pytest.mark.slow
def test_measures_are_llama_perplexitys_with_its_rounding(
    tiny_gguf: Callable[[str], Path], tmp_path: Path
) -> None:
    """The mean to 3 %; of Q8_0, which hangs on a few tokens, to what kernels of llama.cpp differ by."""
    matrix = imatrix.load(GOLDEN / "imatrix" / "tiny-deepseek-v3.imatrix.gguf")
    file_types = ("Q2_K", "IQ3_XXS", "Q4_K_M", "Q8_0")
    for file_type in file_types:
        quantize.quantize(tiny_gguf("f32"), tmp_path / f"{file_type}.gguf", file_type, importances=matrix)
    (tmp_path / "t.txt").write_bytes(calibration_text()[-70000:])
    options = gguf_tools.EvaluateOptions(cut=Cut(512, n_chunks=12), forward=ForwardOptions(like="llama.cpp"))
    files = [tmp_path / f"{file_type}.gguf" for file_type in file_types]
    evaluation = gguf_tools.evaluate(tiny_gguf("f32"), tmp_path / "t.txt", files, options)
    for file_type, model in zip(file_types, evaluation.models, strict=True):
        found = model.divergence.kld
        tolerance = 0.05 if file_type == "Q8_0" else 0.03
        assert found.mean.value == pytest.approx(printed("Mean    KLD", file_type), rel=tolerance), file_type
        assert found.percentiles["median"] == pytest.approx(printed("Median  KLD", file_type), rel=0.03)
        assert found.percentiles["max"] == pytest.approx(printed("Maximum KLD", file_type), rel=0.05)
        assert abs(found.mean.value - printed("Mean    KLD", file_type)) < found.mean.error


@pytest.mark.slow
def test_a_class_of_a_suite_has_llama_perplexitys_divergence(
    tiny_gguf: Callable[[str], Path], tmp_path: Path
) -> None:
    matrix = imatrix.load(GOLDEN / "imatrix" / "tiny-deepseek-v3.imatrix.gguf")
    file_types = ("Q2_K", "IQ3_XXS", "Q4_K_M")
    files = [tmp_path / f"{file_type}.gguf" for file_type in file_types]
    for file_type, path in zip(file_types, files, strict=True):
        quantize.quantize(tiny_gguf("f32"), path, file_type, importances=matrix)
    suite, text = tmp_path / "suite", calibration_text()[-70000:]
    suite.mkdir()
    (suite / "others.txt").write_bytes(text[-9000:])
    (suite / "recorded.txt").write_bytes(text[: length_of(text, 12 * 512 + 100, tiny_gguf("f32"))])
    found = gguf_tools.evaluate_suite(tiny_gguf("f32"), suite, files, like="llama.cpp")
    assert found.by_class["recorded"].text.n_chunks == 12
    for file_type, figures in zip(file_types, found.figures, strict=True):
        wanted = printed("Mean    KLD", file_type)
        assert figures["recorded"].kld.value == pytest.approx(wanted, rel=0.03), file_type
        assert figures["recorded"].median == pytest.approx(printed("Median  KLD", file_type), rel=0.03)


def length_of(text: bytes, n_tokens: int, model: Path) -> int:
    """Return the length in bytes of the first tokens of a text."""
    with open_model(model) as source:
        ids = make_encoder(source.vocab()).encode(text.decode("utf-8", "ignore"))
        pieces = spelled(source.vocab())
    return sum(len(pieces[number]) for number in ids[:n_tokens])


@pytest.mark.slow
def test_a_run_killed_at_any_moment_ends_with_the_same_numbers(
    tiny_folder: Path, tiny_gguf: Callable[[str], Path], tmp_path: Path
) -> None:
    quantize.quantize(tiny_gguf("f32"), tmp_path / "q.gguf", "Q8_0")
    (tmp_path / "t.txt").write_bytes(calibration_text()[-70000:])
    out = tmp_path / "e.json"
    command = [
        sys.executable,
        "-m",
        "gguf_tools",
        "evaluate",
        str(tiny_folder),
        str(tmp_path / "q.gguf"),
    ]
    command += ["-f", str(tmp_path / "t.txt"), "--json", str(out), "--threads", "2"]

    def run() -> None:
        subprocess.run(command, check=True, capture_output=True)

    begin = time.monotonic()
    run()
    seconds, expected = time.monotonic() - begin, json.loads(out.read_text())
    out.unlink()
    n_kills = 10
    for number in range(n_kills):
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        time.sleep(seconds * (0.3 + 0.6 * number / n_kills))
        process.kill()
        process.wait()
    run()
    assert json.loads(out.read_text()) == expected
    assert not out.with_name("e.json.work").exists()
