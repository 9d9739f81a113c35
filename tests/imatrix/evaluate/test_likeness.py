"""Models for embeddings are judged by their vectors: cosines to the base's, and the order of neighbours."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from convert.card.facts import read_report
from gguf_tools.errors import BadRequest

torch = pytest.importorskip("torch")

import convert  # noqa: E402
import gguf_tools  # noqa: E402
from gguf_tools.commands.evaluate import main  # noqa: E402
from imatrix.evaluate.likeness import Likeness, PassageValues  # noqa: E402
from tests.support.encoder_models import write  # noqa: E402
from tests.support.published_models import write as write_published  # noqa: E402

REPOSITORY = Path(__file__).parents[3]
TEXT = REPOSITORY / "examples" / "tiny-deepseek-v3" / "calibration.txt"


def unit(vectors: np.ndarray) -> np.ndarray:
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def test_values_are_those_of_a_plain_computation() -> None:
    random = np.random.default_rng(5)
    base = unit(random.standard_normal((60, 8)))
    model = unit(base + 0.3 * random.standard_normal((60, 8)))
    found = PassageValues.of(base, model)
    for passage in range(60):
        nearest = []
        for vectors in (base, model):
            others = [each for each in range(60) if each != passage]
            others.sort(key=lambda each: -float(vectors[passage] @ vectors[each]))
            nearest.append(set(others[:10]))
        assert found.recall[passage] == len(nearest[0] & nearest[1]) / 10
        assert found.cosine[passage] == pytest.approx(float(base[passage] @ model[passage]))
    halves = [found.of_chunks(range(30)), found.of_chunks(range(30, 60))]
    figures = Likeness.over(halves)
    assert figures.cosine.value == pytest.approx(found.cosine.mean())
    assert figures.recall.value == pytest.approx(found.recall.mean())
    assert figures.recall.low < figures.recall.value < figures.recall.high
    assert figures.lowest == found.cosine.min()


def test_the_same_vectors_are_alike_and_few_passages_are_refused() -> None:
    base = unit(np.random.default_rng(6).standard_normal((50, 8)))
    figures = Likeness.over([PassageValues.of(base, base)])
    assert figures.recall.value == 1
    assert figures.distance == pytest.approx(0, abs=1e-12)
    with pytest.raises(BadRequest, match="49 passages, and Recall@10 needs 50 or more"):
        PassageValues.of(base[:49], base[:49])


def test_an_encoder_is_evaluated_by_its_vectors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = write("bert", tmp_path / "model")
    files = [tmp_path / "f32.gguf", tmp_path / "q4.gguf"]
    for path, outtype in zip(files, ("f32", "Q4_0"), strict=True):
        convert.convert(base, path, outtype=outtype)
    report, page = tmp_path / "report.json", tmp_path / "report.html"
    words = [base, "-f", TEXT, "-c", "32", "--chunks", "60", "--json", report, "--html", page, *files]
    assert main([*map(str, words), "-q"]) == 0
    shown = capsys.readouterr().out
    assert "60 passages of 32 tokens" in shown
    assert "Recall@10" in shown
    exact, rounded = json.loads(report.read_text())["models"]
    assert exact["cosine"] == pytest.approx(1)
    assert exact["recall_at_10"] == 1
    assert 0.9 < rounded["cosine_lowest"] < rounded["cosine_low"] < rounded["cosine"] < 1
    assert 0.5 < rounded["recall_at_10"] < 1
    with pytest.raises(BadRequest, match=r"report\.json: .* \(it measures a model for embeddings, and this"):
        read_report(report)
    for text in (shown, report.read_text(), page.read_text()):
        assert not re.search(r"\b(KLD|kld|PPL|ppl|same.top|flips)\b", text)


def test_what_is_of_predictions_is_refused_for_an_encoder(tmp_path: Path) -> None:
    base = write("bert", tmp_path / "model")
    convert.convert(base, tmp_path / "out.gguf", outtype="f32")
    with pytest.raises(BadRequest, match="model: is for embeddings, and noise_floor=True is for models that"):
        gguf_tools.evaluate(base, TEXT, [tmp_path / "out.gguf"], chunk_size=32, noise_floor=True)


@pytest.mark.slow
def test_classes_have_passages_that_the_model_takes(tmp_path: Path) -> None:
    base = write("modern-bert", tmp_path / "model")
    convert.convert(base, tmp_path / "out.gguf", outtype="Q4_0")
    for name, part in (("one", slice(0, 20000)), ("two", slice(20000, 40000))):
        (tmp_path / "suite" / name).mkdir(parents=True)
        (tmp_path / "suite" / name / "text.txt").write_text(TEXT.read_text()[part])
    found = gguf_tools.evaluate_suite(base, tmp_path / "suite", [tmp_path / "out.gguf"])
    assert [each.text.chunk_size for each in found.by_class.values()] == [130, 130]
    assert {"cosine", "recall_at_10"} <= found.rows()[0].keys()
    (figures,) = found.figures
    assert figures["all"].cosine.value == pytest.approx(
        (figures["one"].cosine.value + figures["two"].cosine.value) / 2
    )
    assert "passages of 130" not in "\n".join(found.lines())
    assert "the model takes no more" in "\n".join(found.lines())


def test_a_decoder_that_pools_is_evaluated_by_its_vectors(tmp_path: Path) -> None:
    base = write_published("qwen3-embedding", tmp_path / "model")
    convert.convert(base, tmp_path / "out.gguf", outtype="Q4_0")
    found = gguf_tools.evaluate(base, TEXT, [tmp_path / "out.gguf"], chunk_size=32, n_chunks=50)
    (model,) = found.models
    assert isinstance(model.divergence, Likeness)
    assert 0.5 < model.divergence.cosine.value < 1
