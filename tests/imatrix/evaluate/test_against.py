"""Files against the one that they are to beat: through the library and through the command."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

import gguf_tools
from gguf_tools.commands.evaluate import main
from gguf_tools.errors import BadRequest
from imatrix.evaluate.against import with_stock
from imatrix.evaluate.comparison import Verdict, compare

torch = pytest.importorskip("torch")

from imatrix.forward.options import ForwardOptions  # noqa: E402
from imatrix.texts.tokens import Cut  # noqa: E402

Made = Callable[[str], Path]
OPTIONS = gguf_tools.EvaluateOptions(cut=Cut(64, n_chunks=6), forward=ForwardOptions(n_threads=1))


def test_every_file_is_compared_with_the_stock_one(made: Made, text: Path) -> None:
    files = [made("Q8_0"), made("IQ3_XXS")]
    found = gguf_tools.evaluate(made("F32"), text, files, OPTIONS, against=made("Q2_K"), noise_floor=True)
    assert [model.path for model in found.models] == [*files, made("Q2_K")]
    better, worse = found.comparisons
    assert (better.path, better.stock) == (files[0], made("Q2_K"))
    assert better.found.overall.verdict is Verdict.BETTER
    pair = {"text.txt": (found.models[0].tokens, found.models[2].tokens)}
    assert found.alone.noise is not None
    assert better.found == compare(pair, {"text.txt": found.alone.noise.kld})
    klds = [model.divergence.kld.mean.value for model in found.models]
    assert worse.found.overall.kld_ratio.value == pytest.approx(klds[1] / klds[2])
    ratio = f"{klds[0] / klds[2]:#.3g}"
    assert better.words.startswith(f"Q8_0.gguf is better than Q2_K.gguf: its mean KLD is {ratio} times as")


def test_the_stock_file_may_be_among_the_others(made: Made, text: Path) -> None:
    files = [made("Q2_K"), made("Q8_0")]
    found = gguf_tools.evaluate(made("F32"), text, files, OPTIONS, against=made("Q2_K"))
    assert len(found.models) == 2
    (only,) = found.comparisons
    assert (only.path, only.stock) == (files[1], files[0])


def test_a_file_alone_has_nothing_to_beat(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    with pytest.raises(BadRequest, match=r"a\.gguf: no other file to compare with it"):
        with_stock([path], path)
    assert with_stock([path], None) == ([path], None)


def test_the_command_says_it_in_words(
    made: Made, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = tmp_path / "r.json"
    words = [str(made("F32")), str(made("Q8_0")), "-f", str(text), "-c", "64", "--chunks", "6", "--quiet"]
    assert main([*words, "--against", str(made("Q2_K")), "--noise-floor", "--json", str(report)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("Q8_0.gguf is better than Q2_K.gguf: its mean KLD is 0.0") for line in lines)
    assert any(line.startswith("8-bit activations ") for line in lines)
    assert max(map(len, lines[1:])) <= 110
    (said,) = json.loads(report.read_text())["comparisons"]
    assert (said["path"], said["against"]) == (str(made("Q8_0")), str(made("Q2_K")))
    assert said["all"]["verdict"] == "better"
    ratio = said["all"]["kld_ratio"]
    assert 0 < ratio["low"] < ratio["value"] < ratio["high"] < 1
    assert said["classes"].keys() == {"text.txt"}
