"""A file calibrated on one kind of text alone: a suite tells that it is better there and worse elsewhere."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

import convert
import gguf_tools
import quantize
from imatrix.evaluate.comparison import Verdict
from tests.support.trained_model import calibration_text

pytest.importorskip("torch")

from imatrix.forward.options import ForwardOptions
from imatrix.texts.tokens import Cut

FOLDER = Path(__file__).parents[3] / "examples" / "small-llama"
SENTENCES = (
    "Съешь же ещё этих мягких французских булок, да выпей чаю.",
    "Всички хора се раждат свободни и равни по достойнство и права.",
    "Όλοι οι άνθρωποι γεννιούνται ελεύθεροι.",
)
ONE_THREAD = ForwardOptions(n_threads=1)


@pytest.mark.slow
def test_an_overfitted_file_is_told(tmp_path: Path) -> None:
    """STOCK was calibrated on as many tokens, of both kinds and of other pages."""
    code, other_code = (calibration_text()[start : start + 4000].decode() for start in (100_000, 20_000))
    words = [word for sentence in SENTENCES for word in sentence.split()]
    scripts = " ".join(random.Random(1).choices(words, k=150))
    suite, base = tmp_path / "suite", tmp_path / "base.gguf"
    suite.mkdir()
    for name, text in (("code", code), ("scripts", scripts)):
        (suite / f"{name}.txt").write_text(text, encoding="utf-8")
    (suite / "suite.yaml").write_text("title: T\nclasses: {code: {context: 64}, scripts: {context: 64}}\n")
    convert.convert(FOLDER, base, outtype="f32")
    files = {}
    for name, text in (("overfitted", code), ("stock", f"{other_code[:2000]}\n{scripts[:600]}")):
        own, files[name] = tmp_path / f"{name}.txt", tmp_path / f"{name}.gguf"
        own.write_text(text, encoding="utf-8")
        calibration = gguf_tools.Calibration(own, Cut(64, n_chunks=16), forward=ONE_THREAD, any_text=True)
        quantize.quantize(base, files[name], "Q2_K", calibration=calibration)
    found = gguf_tools.evaluate_suite(
        base, suite, [files["overfitted"]], forward=ONE_THREAD, against=files["stock"]
    )
    (told,) = found.comparisons
    verdicts = {each.name: each.verdict for each in told.found.by_class}
    assert verdicts == {"code": Verdict.BETTER, "scripts": Verdict.WORSE}
    assert told.words.endswith("Better on code; worse on scripts.")
    assert told.found.overall.verdict is Verdict.WORSE
