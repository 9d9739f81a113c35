"""States of a base that are kept for later runs."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import convert
import gguf_tools
from gguf_tools.errors import BadRequest, TruncatedError
from gguf_tools.progress import NoReport
from imatrix.evaluate.evaluation import Evaluation
from tests.support.decoder_models import decoder_model

pytest.importorskip("torch")

from imatrix.evaluate.bases.cached_states import KeptStates
from imatrix.forward.options import ForwardOptions
from imatrix.texts.tokens import Cut

OPTIONS = gguf_tools.EvaluateOptions(cut=Cut(64, n_chunks=3), forward=ForwardOptions(n_threads=1))
Made = Callable[[str], Path]


class Layers(NoReport):
    """A Reporter that notes how much work there is, and how much need not be done."""

    def __init__(self) -> None:
        self.work = self.done = 0.0

    def start(self, work: float, done: float) -> None:
        self.work, self.done = work, done


def without_tensors(evaluation: Evaluation) -> dict[str, Any]:
    """Return the JSON without the errors of tensors, for which the base's weights are needed."""
    found = evaluation.to_json()
    for model in found["models"]:
        model["worst_layer"]["tensors"] = []
    return found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_later_run_gives_the_same_numbers_without_the_base(
    dtype: Any, made: Made, text: Path, tmp_path: Path
) -> None:
    base = tmp_path / "base.gguf"
    shutil.copyfile(made("F32"), base)
    plain = replace(OPTIONS, forward=ForwardOptions(n_threads=1, dtype=dtype))
    expected = gguf_tools.evaluate(base, text, [made("Q2_K"), made("Q8_0")], plain)
    options = replace(plain, keep=tmp_path / "kept")
    first = gguf_tools.evaluate(base, text, [made("Q2_K")], options)
    assert first.models[0].divergence == expected.models[0].divergence
    base.unlink()
    report = Layers()
    later = gguf_tools.evaluate(base, text, [made("Q2_K"), made("Q8_0")], options, report)
    assert report.done == 3
    assert report.work > 9, "layers of three models, and their logits"
    assert later.to_json() == without_tensors(expected)
    assert later.models[0].worst_layer is not None


@pytest.mark.parametrize("name", ["starcoder2", "phimoe"])
def test_the_end_of_a_base_with_biases(name: str, text: Path, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    base, file = tmp_path / "base.gguf", tmp_path / "file.gguf"
    decoder_model(name, tmp_path / "m")
    convert.convert(tmp_path / "m", base, outtype="f32")
    convert.convert(tmp_path / "m", file, outtype="q8_0")
    options = replace(OPTIONS, keep=tmp_path / "kept")
    first = gguf_tools.evaluate(base, text, [file], options)
    base.unlink()
    later = gguf_tools.evaluate(base, text, [file], options)
    assert later.models[0].divergence == first.models[0].divergence


def test_a_base_that_is_still_there_is_not_computed_again(made: Made, text: Path, tmp_path: Path) -> None:
    options = replace(OPTIONS, keep=tmp_path / "kept")
    found = []
    for done in (0, 3):
        report = Layers()
        found.append(gguf_tools.evaluate(made("F32"), text, [made("Q8_0")], options, report).to_json())
        assert report.done == done
    assert found[0] == found[1], "the errors of tensors, too"
    gguf_tools.evaluate(made("F32"), text, [made("Q8_0")], replace(options, restart=True), report)
    assert report.done == 0


@pytest.fixture
def kept(made: Made, text: Path, tmp_path: Path) -> gguf_tools.EvaluateOptions:
    options = replace(OPTIONS, keep=tmp_path / "kept")
    gguf_tools.evaluate(made("F32"), text, [made("Q8_0")], options)
    return options


def test_states_of_something_else_are_refused(
    kept: gguf_tools.EvaluateOptions, tiny_folder: Path, made: Made, text: Path, tmp_path: Path
) -> None:
    quants = [made("Q8_0")]
    (tmp_path / "other.txt").write_bytes(text.read_bytes()[5000:])
    with pytest.raises(BadRequest, match=r"kept: has states of another text \(.*name another folder"):
        gguf_tools.evaluate(made("F32"), tmp_path / "other.txt", quants, kept)
    bfloat16 = ForwardOptions(n_threads=1, dtype="bfloat16")
    with pytest.raises(BadRequest, match=r"kept: has states of another dtype \(float32, now bfloat16\)"):
        gguf_tools.evaluate(made("F32"), text, quants, replace(kept, forward=bfloat16))
    with pytest.raises(BadRequest, match="kept: has states of another base"):
        gguf_tools.evaluate(tiny_folder, text, quants, kept)
    with pytest.raises(BadRequest, match=r"kept: has states of another name \(F32.gguf, now gone.gguf\)"):
        gguf_tools.evaluate(tmp_path / "gone.gguf", text, quants, kept)


def test_states_that_were_cut_short_are_named(
    kept: gguf_tools.EvaluateOptions, made: Made, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, read = tmp_path / "kept" / "states.00001", KeptStates.rows

    def cut(self: KeptStates, numbers: Any) -> Any:
        """A program that shortens a file while a run reads it."""
        path.write_bytes(path.read_bytes()[:4])
        return read(self, numbers)

    monkeypatch.setattr(KeptStates, "rows", cut)
    with pytest.raises(TruncatedError, match=r"kept/states\.00001: shorter than it was written"):
        gguf_tools.evaluate(made("F32"), text, [made("Q8_0")], kept)


class Killed(Exception):
    pass


class KillAfter(Layers):
    def __init__(self, n_calls: int) -> None:
        super().__init__()
        self.left = n_calls

    def advance(self, layers: float) -> None:
        self.left -= 1
        if self.left < 0:
            raise Killed


def test_an_interrupted_run_keeps_all_in_the_end(
    made: Made, text: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    quants = [made("Q8_0")]
    expected = gguf_tools.evaluate(made("F32"), text, quants, OPTIONS)
    options = replace(OPTIONS, keep=tmp_path / "kept", work=tmp_path / "work")
    with pytest.raises(Killed):
        gguf_tools.evaluate(made("F32"), text, quants, options, KillAfter(25))
    assert "facts" not in json.loads((tmp_path / "kept" / "about.json").read_text())
    state = tmp_path / "kept" / "states.00000"
    state.unlink()
    assert gguf_tools.evaluate(made("F32"), text, quants, options).to_json() == expected.to_json()
    assert "states.00000: missing, or not as it was written; computing all" in caplog.text
    assert json.loads((tmp_path / "kept" / "about.json").read_text())["facts"]["n_layers"] == 3
    assert gguf_tools.evaluate(made("F32"), text, quants, options).to_json() == expected.to_json()
