"""Figures over the classes of a suite: each class weighs the same, and errors are over chunks."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from gguf_tools.errors import BadRequest
from gguf_tools.text import MAX_WIDTH
from imatrix.evaluate.divergence import TokenValues, mean_over_chunks, measure
from imatrix.evaluate.evaluation import ClassEvaluation, EvaluatedModel, Evaluation
from imatrix.evaluate.figures import Figures
from imatrix.texts.chunks import Chunks
from imatrix.texts.suite import Suite
from imatrix.texts.tokenise import ClassChunks

FILES = ("lite-Q2_K.gguf", "lite-Q4_K_M.gguf")


def some_tokens(sizes: list[int], seed: int, level: float = 0.01) -> TokenValues:
    """Return values of chunks with so many measured tokens, which have something in common in each chunk."""
    rng = np.random.default_rng(seed)
    chunk = np.repeat(np.arange(len(sizes)), sizes)
    of_chunk = rng.uniform(0.2, 3, len(sizes))[chunk]
    n = len(chunk)
    base = -rng.exponential(1, n)
    return TokenValues(
        chunk=chunk,
        position=np.concatenate([np.arange(size) for size in sizes]),
        base_log_prob=base,
        log_prob=base - 0.1 * of_chunk * rng.standard_normal(n),
        kld=rng.exponential(level, n) * of_chunk,
        base_top=np.zeros(n, np.int64),
        top=(rng.random(n) < 0.05 * of_chunk).astype(np.int64),
        base_top_p=rng.random(n),
    )


def naive_error(values: np.ndarray, chunk: np.ndarray) -> float:
    """Return the linearised error of the mean: how much the sum of each chunk strays from its share."""
    mean = sum(values) / len(values)
    strays = []
    for number in sorted(set(chunk)):
        own = [value for value, each in zip(values, chunk, strict=True) if each == number]
        strays.append(sum(own) - mean * len(own))
    n = len(strays)
    return math.sqrt(n / (n - 1) * sum(stray**2 for stray in strays)) / len(values)


def test_the_error_over_chunks_is_that_of_their_sums() -> None:
    tokens = some_tokens([7, 30, 12, 25], seed=1)
    found = mean_over_chunks(tokens.kld, tokens.chunk)
    assert found.value == pytest.approx(tokens.kld.mean())
    assert found.error == pytest.approx(naive_error(tokens.kld, tokens.chunk))
    alike = mean_over_chunks(np.repeat([1.0, 2.0, 4.0], 10), np.repeat(np.arange(3), 10))
    assert alike.error == pytest.approx(np.std([1, 2, 4], ddof=1) / math.sqrt(3)), "of chunks, not of tokens"
    assert math.isnan(mean_over_chunks(tokens.kld[:7], tokens.chunk[:7]).error)


def test_the_error_over_chunks_covers_the_truth() -> None:
    """Tokens that have their chunk's level in common: taken as independent, their error is far too small."""
    rng = np.random.default_rng(0)
    chunk = np.repeat(np.arange(60), 50)
    hits, hits_of_tokens = 0, 0
    for _ in range(400):
        values = rng.normal(0, 1, 60)[chunk] + rng.normal(0, 1, len(chunk))
        found = mean_over_chunks(values, chunk)
        hits += abs(found.value) < 2 * found.error
        hits_of_tokens += abs(found.value) < 2 * values.std() / math.sqrt(len(values))
    assert hits / 400 == pytest.approx(0.95, abs=0.03)
    assert hits_of_tokens / 400 < 0.5


def test_figures_of_a_class_are_its_measures() -> None:
    tokens = some_tokens([20, 30, 25], seed=2)
    found, expected = Figures.over([tokens]), measure(tokens)
    assert found.kld.value == expected.kld.mean.value
    assert (found.ppl, found.base_ppl) == (expected.ppl.value, expected.base_ppl.value)
    assert found.ln_ratio.value == pytest.approx(expected.ln_ratio.value)
    for name in ("median", "p99", "p99_9"):
        assert getattr(found, name) == pytest.approx(expected.kld.percentiles[name], rel=1e-12)
    for name in ("same_top", "flips", "flips_of_confident"):
        assert getattr(found, name).value == pytest.approx(getattr(expected, name).value)


def test_flips_are_of_tokens_that_the_base_gives_more_than_nine_tenths() -> None:
    base_top_p = np.array([0.95, 0.95, 0.95, 0.95, 0.9, 0.5])
    tokens = replace(
        some_tokens([6], seed=3), base_top_p=base_top_p, base_top=np.zeros(6, np.int64),
        top=np.array([0, 0, 0, 1, 1, 1]),
    )  # fmt: skip
    found = measure(tokens)
    assert (found.same_top.value, found.flips.value, found.flips_of_confident.value) == (0.5, 1 / 6, 1 / 4)
    unsure = measure(replace(tokens, base_top_p=np.full(6, 0.5)))
    assert unsure.flips.value == 0
    assert math.isnan(unsure.flips_of_confident.value)


def test_each_class_weighs_the_same() -> None:
    small, large = some_tokens([100, 200], seed=4, level=0.5), some_tokens([300, 200, 100], seed=5)
    found = Figures.over([small, large])
    one, other = Figures.over([small]), Figures.over([large])
    for name in ("kld", "ln_ratio", "same_top", "flips"):
        values = [getattr(each, name) for each in (one, other)]
        assert getattr(found, name).value == pytest.approx(np.mean([each.value for each in values]))
        assert getattr(found, name).error == pytest.approx(math.hypot(*(each.error for each in values)) / 2)
    assert found.ppl == pytest.approx(math.sqrt(one.ppl * other.ppl))
    repeated = np.concatenate([np.repeat(small.kld, 2), large.kld])  # as many tokens of both classes
    assert found.median == pytest.approx(np.percentile(repeated, 50), rel=0.02)
    assert found.p99 == pytest.approx(np.percentile(repeated, 99), rel=0.02)


def test_a_class_of_one_chunk_has_the_mean_variance_of_the_others() -> None:
    classes = [some_tokens([30, 40], seed=6), some_tokens([35, 20, 10], seed=7), some_tokens([50], seed=8)]
    errors = [Figures.over([each]).kld.error for each in classes]
    assert math.isnan(errors[2])
    expected = math.sqrt((errors[0] ** 2 + errors[1] ** 2) / 2 / 3)
    assert Figures.over(classes).kld.error == pytest.approx(expected)
    assert math.isnan(Figures.over(classes[2:]).kld.error)


@pytest.fixture
def evaluation() -> Evaluation:
    """Two files on three classes, the last of one chunk."""
    by_class = {}
    for number, (name, sizes) in enumerate({"prose": [40, 40], "code": [9, 14, 30], "chat": [12]}.items()):
        tokens = [some_tokens(sizes, 10 * number + seed, 0.01 / (1 + seed)) for seed in range(len(FILES))]
        bounds = np.cumsum([0, *(size + 1 for size in sizes)])
        ids = np.zeros(bounds[-1], np.int64)
        chunks = Chunks(ids, ids, bounds, ~np.isin(np.arange(bounds[-1]), bounds))
        notes = tuple(f"{name}.txt: left out {each}" for each in range(number * 4))
        places = tuple(f"{name}: {each}" for each in range(len(sizes)))
        text = ClassChunks(name, name.title(), chunks, "ab" * 32, (), places, None, notes)
        models = tuple(
            EvaluatedModel(Path(file), 10**6, 4.5, measure(each), (), None, each, ())
            for file, each in zip(FILES, tokens, strict=True)
        )
        by_class[name] = ClassEvaluation(text, models[0].divergence.base_ppl, models)
    suite = Suite("ours", "Our texts", (), quick=True)
    return Evaluation(Path("lite-bf16.gguf"), by_class, suite=suite)


def test_there_is_a_row_for_each_file_and_class_and_over_all(evaluation: Evaluation) -> None:
    rows = evaluation.rows()
    assert [(row["file"], row["class"]) for row in rows] == [
        (file, name) for file in FILES for name in ("prose", "code", "chat", "all")
    ]
    assert len({tuple(row) for row in rows}) == 1, "all have the same columns"
    by_class = {row["class"]: row for row in rows[:4]}
    assert [by_class[name]["n_tokens_measured"] for name in by_class] == [80, 53, 12, 145]
    assert by_class["all"]["n_chunks"] == 6
    klds = [by_class[name]["kld"] for name in ("prose", "code", "chat")]
    assert by_class["all"]["kld"] == pytest.approx(np.mean(klds))
    assert by_class["code"]["kld"] == evaluation.by_class["code"].models[0].divergence.kld.mean.value


def test_json_has_figures_and_all_measures_of_every_class(evaluation: Evaluation) -> None:
    found = json.loads(json.dumps(evaluation.to_json(), allow_nan=False))
    assert found["suite"]["quick"] is True
    assert [each["name"] for each in found["suite"]["classes"]] == ["prose", "code", "chat"]
    assert found["base"] == {"path": "lite-bf16.gguf"}
    model = found["models"][1]
    assert (model["path"], model["n_bytes"]) == (FILES[1], 10**6)
    assert model["all"]["kld"] == evaluation.rows()[-1]["kld"]
    code = model["classes"]["code"]
    assert code["kld"] == code["evaluation"]["kld"]["mean"]
    assert code["kld_error"] != code["evaluation"]["kld"]["error"], "over chunks, and over tokens"


def test_lines_fit_the_terminal_and_notes_are_few(evaluation: Evaluation) -> None:
    lines = evaluation.lines()
    assert max(map(len, lines)) <= MAX_WIDTH
    assert lines[0] == "suite ours: 3 classes, a tenth of each, 145 tokens measured"
    assert sum("left out" in line for line in lines) == 4 + 5
    assert "note: chat: 3 more like these" in lines
    assert [line.split()[0] for line in lines if line.startswith("all ")] == ["all"] * len(FILES)
    assert repr(evaluation).startswith("<Evaluation of lite-bf16.gguf on 3 classes of ours: lite-Q2_K.gguf")
    assert "<th>flips</th>" in evaluation._repr_html_()


def test_a_data_frame_is_made_of_the_rows(evaluation: Evaluation, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gguf_tools.dataframes.find_spec", lambda name: None)
    with pytest.raises(BadRequest, match="a DataFrame needs pandas: pip install pandas"):
        evaluation.to_dataframe()
    pandas = ModuleType("pandas")
    pandas.DataFrame = list  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pandas", pandas)
    monkeypatch.setattr("gguf_tools.dataframes.find_spec", lambda name: name)
    assert evaluation.to_dataframe() == evaluation.rows()


def test_several_classes_are_not_alone(evaluation: Evaluation) -> None:
    with pytest.raises(ValueError, match="too many values"):
        _ = evaluation.alone
