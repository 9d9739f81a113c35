"""The page of an evaluation: what its charts show, and how it behaves in a browser."""

from __future__ import annotations

import json
import os
import re
import shutil
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gguf_tools
from convert.card.facts import read_report
from gguf_tools.commands.evaluate import main
from gguf_tools.errors import BadRequest
from gguf_tools.format.ggml_types import F32, Q2_K, Q4_K, Q6_K
from gguf_tools.format.tensors import TensorInfo
from imatrix.evaluate.evaluation import EvaluatedModel, Evaluation
from imatrix.evaluate.report.map_chart import TensorMap, types_by_bits
from imatrix.evaluate.report.passages import N_TOKENS, worst_passages
from imatrix.evaluate.report.points import (
    Point,
    earlier_points,
    measured_points,
    pareto_front,
    prices_of,
    short_names,
)
from imatrix.texts.spelling import spelled, texts
from quantize.plan.sensitivities import Sensitivities, TensorSensitivity

pytest.importorskip("torch")
pytest.importorskip("matplotlib")

from imatrix.evaluate.report.page import report_page
from imatrix.forward.options import ForwardOptions
from imatrix.texts.tokens import Cut

Made = Callable[[str], Path]


@pytest.fixture(scope="module")
def evaluation(made: Made, text: Path) -> Evaluation:
    options = gguf_tools.EvaluateOptions(cut=Cut(128, n_chunks=3), forward=ForwardOptions(n_threads=1))
    return gguf_tools.evaluate(made("F32"), text, [made("Q2_K"), made("Q8_0"), made("F32")], options)


def with_models(evaluation: Evaluation, models: Sequence[EvaluatedModel]) -> Evaluation:
    """Return an evaluation on one text with other models."""
    ((name, alone),) = evaluation.by_class.items()
    return replace(evaluation, by_class={name: replace(alone, models=tuple(models))})


def written(evaluation: Evaluation, path: Path, **changes: Any) -> Path:
    """Write the JSON of an evaluation, after changes to what it says of text and base."""
    content = evaluation.to_json()
    for key, value in changes.items():
        content["base" if key == "ppl" else "text"][key] = value
    path.write_text(json.dumps(content))
    return path


def test_the_front_has_what_no_other_file_beats() -> None:
    small, large = Point("small", 10, 0.5, 0), Point("large", 30, 0.1, 0)
    beaten, equal = Point("beaten", 20, 0.6, 1), Point("equal", 30, 0.1, 1)
    assert pareto_front([large, beaten, equal, small]) == (small, large)
    assert pareto_front([]) == ()


def test_names_lose_what_all_begin_with() -> None:
    assert short_names(["lite-Q4_K_M.gguf", "lite-Q4_K_S.gguf"]) == ["Q4_K_M", "Q4_K_S"]
    assert short_names(["a.gguf"]) == ["a"]
    assert short_names(["a-b.gguf", "a-b.gguf"]) == ["b", "b"]
    assert short_names(["x-.gguf", "x-1.gguf"]) == ["x-", "x-1"]


def test_earlier_files_stand_beside(evaluation: Evaluation, tmp_path: Path) -> None:
    earlier = read_report(written(evaluation, tmp_path / "stock.json"))
    found = earlier_points(earlier, 1, evaluation)
    assert found == tuple(replace(point, group=1) for point in measured_points(evaluation))
    assert [point.kld for point in found] == [each.divergence.kld.mean.value for each in evaluation.models]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sha256": "0"}, r"stock\.json: measured on another text \(sha256 0, here [0-9a-f]{64}\)"),
        ({"chunk_size": 64}, r"another context \(tokens 64, here 128\)"),
        ({"n_chunks": 4}, "measured on 4 chunks of the text, here 3"),
        ({"ppl": 100.0}, r"measured against another base \(PPL 100\.0000, here"),
    ],
)
def test_numbers_that_do_not_compare_are_refused(
    changes: dict[str, Any], message: str, evaluation: Evaluation, tmp_path: Path
) -> None:
    earlier = read_report(written(evaluation, tmp_path / "stock.json", **changes))
    with pytest.raises(BadRequest, match=message):
        earlier_points(earlier, 1, evaluation)


def test_what_is_no_evaluation_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    for content in ("{", "[]", '{"text": 1}', '{"text": {}, "base": {}, "models": []}'):
        path.write_text(content)
        with pytest.raises(BadRequest, match=r"x\.json: not a report of `evaluate --json`"):
            read_report(path)
    with pytest.raises(BadRequest, match=r"y\.json: can't be read \(No such file"):
        read_report(tmp_path / "y.json")


def test_tokens_spell_the_text(evaluation: Evaluation, text: Path) -> None:
    found = evaluation.alone.text
    spelled_text = b"".join(found.spelled[token] for token in found.chunks.tokens[1:].tolist())
    assert len(spelled_text) > 600
    assert spelled_text in text.read_bytes()
    assert np.flatnonzero(found.chunks.scored)[0] == 65


def test_sentencepiece_tokens_spell_spaces_and_bytes() -> None:
    from gguf_tools.format import keys
    from gguf_tools.format.values import Value

    vocab = {
        keys.TOKENIZER_MODEL: Value.string("llama"),
        keys.TOKENIZER_TOKENS: Value.strings(["<s>", "<0xC3>", "<0xAF>", "\u2581na", "\u00e9"]),
    }
    assert texts([spelled(vocab)[number] for number in (3, 1, 2, 4)]) == [" na", "", "\u00ef", "\u00e9"]


def test_the_worst_passages_are_those_with_the_largest_divergence(evaluation: Evaluation) -> None:
    kld = np.full((3, 63), 0.01)
    kld[1, 10 : 10 + N_TOKENS] = 0.5
    kld[2, 0] = 3.0
    values = replace(evaluation.models[0].tokens, kld=kld.ravel())
    worst, second, third = worst_passages(evaluation.alone.text, values, 3)
    assert (worst.chunk, worst.position, worst.kld) == (1, 64 + 1 + 10, pytest.approx(0.5))
    assert (second.chunk, second.position) == (2, 65)
    assert third.chunk == 0
    text = evaluation.alone.text
    second_chunk = text.chunks.tokens[128:256]
    tokens = second_chunk[75 : 75 + N_TOKENS].tolist()
    shown = "".join(token.text for token in worst.tokens)
    assert shown == b"".join(text.spelled[token] for token in tokens).decode()
    before = b"".join(text.spelled[token] for token in second_chunk[51:75].tolist()).decode()
    assert worst.before == before


def test_a_passage_tells_what_both_models_would_have_written(evaluation: Evaluation) -> None:
    text, values = evaluation.alone.text, evaluation.models[0].tokens
    passage = worst_passages(text, values, 1)[0]
    here = (values.chunk == passage.chunk) & (values.position >= passage.position - 1)
    first, kld = np.flatnonzero(here)[:N_TOKENS], values.kld
    changed = [place for place in first if values.top[place] != values.base_top[place]]
    worst = max(changed, key=lambda place: kld[place])
    before, token = passage.changes(3)[0]
    words = [text.spelled[top[worst]].decode() for top in (values.base_top, values.top)]
    assert [token.base_word, token.word] == words
    assert (token.kld, token.base_word_p) == (kld[worst], values.base_top_p[worst])
    assert before.endswith("".join(token.text for token in passage.tokens[: worst - first[0]]))
    assert len(passage.changes(99)) == len(changed)


def test_a_map_has_a_column_for_each_layer() -> None:
    tensors = [
        TensorInfo("token_embd.weight", (9, 256), Q6_K),
        TensorInfo("blk.0.attn_q.weight", (1, 256), Q4_K),
        TensorInfo("blk.1.attn_q.weight", (1, 256), Q4_K),
        TensorInfo("blk.1.exp_probs_b.bias", (3,), F32),
    ]
    found = TensorMap.of(tensors)
    assert found.rows == ("token_embd", "attn_q", "exp_probs_b.bias")
    assert [(cell.row, cell.column) for cell in found.cells] == [(0, 0), (1, 1), (1, 2), (2, 2)]
    assert types_by_bits(tensors) == (Q4_K, Q6_K, F32)


def losses_of(evaluation: Evaluation) -> Sensitivities:
    """Return made-up losses of some tensors, as if each had rows of 256."""
    known = {}
    for tensor in evaluation.models[0].tensors:
        if tensor.type in (Q2_K, Q4_K) and not tensor.name.startswith("blk.1."):
            n_rows = tensor.n_bytes // tensor.type.row_bytes(256)
            known[tensor.name] = TensorSensitivity((n_rows, 256), {"Q2_K": 8e-3, "Q4_K": 1e-3, "Q6_K": 1e-4})
    return Sensitivities(known)


def test_prices_are_what_the_best_larger_type_saves(evaluation: Evaluation) -> None:
    losses, tensors = losses_of(evaluation), evaluation.models[0].tensors
    prices = prices_of(tensors, losses)
    assert prices.keys() == losses.tensors.keys()
    tensor = next(tensor for tensor in tensors if tensor.name in prices and tensor.type == Q2_K)
    shape, price = losses.tensors[tensor.name].shape, prices[tensor.name]
    more_bytes = Q4_K.tensor_bytes(shape) - tensor.n_bytes
    assert (price.loss, price.larger) == (8e-3, "Q4_K")
    assert price.per_mib == pytest.approx(7e-3 / more_bytes * 2**20)


@pytest.mark.slow
def test_the_page_says_what_more_bytes_would_save(evaluation: Evaluation) -> None:
    one = with_models(evaluation, evaluation.models[:1])
    page = report_page(one, losses=losses_of(evaluation))
    assert "What more bytes would save" in page
    assert re.search(r"blk\.0\.attn_q_a\.weight: Q2_K, predicted loss 0.008; Q4_K would save", page)


@pytest.mark.parametrize(
    ("other", "complaint"),
    [
        (
            {"blk.9.x.weight": TensorSensitivity((1, 256), {"Q2_K": 1.0})},
            "blk.9.x.weight: has losses, but the file lacks",
        ),
        (
            {"token_embd.weight": TensorSensitivity((1, 256), {"Q2_K": 1.0})},
            "token_embd.weight: .* a shape of",
        ),
    ],
)
def test_losses_of_another_model_are_refused(
    evaluation: Evaluation, other: dict[str, TensorSensitivity], complaint: str
) -> None:
    with pytest.raises(BadRequest, match=complaint):
        prices_of(evaluation.models[0].tensors, Sensitivities(other))


def test_a_page_loads_nothing_and_says_what_strangers_names_say(
    evaluation: Evaluation, tmp_path: Path
) -> None:
    hostile = Path("<script>alert(1)&$x^2$\x1b[2J.gguf")
    models = (replace(evaluation.models[0], path=hostile), *evaluation.models[1:])
    page = with_models(evaluation, models).to_html(written(evaluation, tmp_path / "stock.json"))
    assert "What more bytes would save" not in page
    assert "Not shown, because the divergence is 0: F32.gguf." in page
    assert "<script" not in page
    assert "\x1b" not in page
    assert "&lt;script&gt;" in page
    assert not re.search(r"#00ff\d\d", page), "a colour that stands for a name is left"
    outside = re.sub(r'xmlns(:\w+)?="[^"]*"', "", page)
    assert not re.search(r'(src|href)="(?!#)', outside)
    assert "@import" not in outside
    drawings = [ElementTree.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", page, re.DOTALL)]
    assert len(drawings) == 2 * (4 + len(models))
    counts = Counter(
        element.get("id") for svg in drawings for element in svg.iter() if element.get("id") is not None
    )
    assert {name for name, count in counts.items() if count > 1} == set()


@pytest.mark.slow
def test_a_page_of_a_file_equal_to_its_base_alone(evaluation: Evaluation) -> None:
    assert "Drift by layer" in report_page(with_models(evaluation, evaluation.models[2:]))


def test_the_command_writes_the_page(
    made: Made,
    text: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    words = [str(made("F32")), str(made("Q8_0")), "-f", str(text), "-c", "64", "--chunks", "2"]
    stock, page = tmp_path / "stock.json", tmp_path / "r.html"
    assert main([*words, "--json", str(stock)]) == 0
    assert main([*words, "--html", str(page), "--compare-with", str(stock)]) == 0
    assert page.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    assert f"wrote {page}" in capsys.readouterr().out
    assert main([*words, "--compare-with", str(stock)]) == 2
    assert "--compare-with is for the page of --html, which is missing" in capsys.readouterr().err
    assert main([*words, "--html", str(page)]) == 1
    assert f"{page}: exists already; --force replaces it" in capsys.readouterr().err
    assert main([*words[:-3], "32", "--html", str(page), "--compare-with", str(stock), "--force"]) == 1
    assert "measured on another context (tokens 64, here 32)" in capsys.readouterr().err
    monkeypatch.setattr(
        "gguf_tools.drawing.find_spec",
        lambda name: None if name == "matplotlib" else find_spec(name),
    )
    assert main([*words, "--html", str(page), "--force"]) == 1
    assert capsys.readouterr().err.strip() == (
        "evaluate: error: --html needs matplotlib: pip install 'gguf-tools[report]'"
    )


# ---- In a browser


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A headless Chromium: the one that CHROMIUM names, one that is installed, or playwright's own."""
    api = pytest.importorskip("playwright.sync_api", reason="playwright drives the browser")
    names = ("chromium", "chromium-browser", "google-chrome", "chrome-headless-shell")
    path = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, names)), None)
    with api.sync_playwright() as playwright:
        try:
            opened = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        except api.Error as error:
            pytest.skip(f"no Chromium: set CHROMIUM, or `playwright install chromium` ({str(error)[:80]})")
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def page_file(evaluation: Evaluation, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("report") / "r.html"
    path.write_text(report_page(evaluation), encoding="utf-8")
    return path


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_a_browser_shows_the_page(width: int, scheme: str, browser: Any, page_file: Path) -> None:
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    page = context.new_page()
    told: list[str] = []
    requests: list[str] = []
    page.on("console", lambda message: told.append(message.text))
    page.on("pageerror", lambda error: told.append(str(error)))
    page.on("request", lambda request: requests.append(request.url))
    page.goto(page_file.as_uri())
    assert told == []
    assert requests == [page_file.as_uri()]
    assert page.evaluate("document.documentElement.scrollWidth") == width, "nothing sticks out"
    drawn = page.evaluate(
        "[...document.querySelectorAll('.charts svg')].map(svg => svg.getBoundingClientRect().width)"
    )
    shown = [part for part in drawn if part]
    assert len(shown) == 4, "each chart is there once"
    assert all(0.35 * width < part < width for part in shown)
    overlaps, smallest = page.evaluate(
        """() => {
            const boxes = [...document.querySelectorAll('.charts svg')].flatMap(svg => ['x', 'y'].map(
                axis => [...svg.querySelectorAll(`[id*="-${axis}tick_"] text`)]
                    .map(text => text.getBoundingClientRect()).filter(box => box.width)));
            const meet = (a, b) =>
                a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom;
            const overlaps = axis => axis.some((a, i) => axis.slice(i + 1).some(b => meet(a, b)));
            return [boxes.filter(overlaps).length,
                    Math.min(...boxes.flat().map(box => box.height))];
        }"""
    )
    assert overlaps == 0, "labels of an axis stand side by side"
    assert smallest > 11, "labels are not scaled down to what can't be read"
    light = page.evaluate(
        """() => {
            const sum = colour => colour.match(/\\d+/g).slice(0, 3).map(Number).reduce((a, b) => a + b);
            const texts = [...document.querySelectorAll('.charts svg text')];
            const text = texts.find(text => text.getBoundingClientRect().width);
            return [sum(getComputedStyle(document.body).backgroundColor), sum(getComputedStyle(text).fill)];
        }"""
    )
    background, ink = light
    assert (background > 700 and ink < 100) if scheme == "light" else (background < 100 and ink > 700)
    context.close()
