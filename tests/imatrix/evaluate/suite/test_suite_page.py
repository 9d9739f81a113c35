"""The page of a suite: a row for each class, ratios to stock, the noise floor, and earlier evaluations."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import gguf_tools
from convert.card.facts import read_report
from gguf_tools.commands.evaluate import main
from gguf_tools.errors import BadRequest
from imatrix.evaluate.evaluation import Evaluation
from imatrix.evaluate.report.points import refuse_other_classes
from tests.imatrix.evaluate.suite.test_tokenise import write
from tests.support.trained_model import calibration_text

pytest.importorskip("torch")
pytest.importorskip("matplotlib")

from imatrix.evaluate.report.page import report_page
from imatrix.forward.options import ForwardOptions

Made = Callable[[str], Path]
CLASSES = ("letters", "manual", "tales")


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    text = calibration_text().decode()
    texts = {name: text[start : start + 1600] for name, start in zip(CLASSES, (0, 9000, 30000), strict=True)}
    classes = "".join(f"  {name}: {{context: 64}}\n" for name in CLASSES)
    return write(tmp_path_factory.mktemp("suite"), f"title: Small texts\nclasses:\n{classes}", **texts)


@pytest.fixture(scope="module")
def evaluation(made: Made, suite: Path) -> Evaluation:
    files = [made("Q2_K"), made("IQ3_XXS"), made("Q8_0")]
    return gguf_tools.evaluate_suite(
        made("F32"), suite, files, forward=ForwardOptions(n_threads=1), against=files[1], noise_floor=True
    )


@pytest.fixture(scope="module")
def page(evaluation: Evaluation) -> str:
    return report_page(evaluation)


def drawings(page: str) -> list[ElementTree.Element]:
    return [ElementTree.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", page, re.DOTALL)]


@pytest.mark.slow
def test_every_class_has_a_row_in_every_chart(page: str) -> None:
    by_class = [svg for svg in drawings(page) if "by class of texts" in svg.get("aria-label", "")]
    assert len(by_class) == 2 * 3, "divergence, ratio to stock and flips, each in two sizes"
    for svg in by_class:
        texts = ["".join(text.itertext()) for text in svg.iter("{http://www.w3.org/2000/svg}text")]
        assert {*CLASSES, "all"} <= set(texts)


def test_marks_tell_their_figures(evaluation: Evaluation, page: str) -> None:
    kld = evaluation.figures[2]["tales"].kld.value
    assert f"<title>Q8_0.gguf, tales: {kld:.5f} (" in page
    (better,) = [each for each in evaluation.comparisons if each.path.name == "Q8_0.gguf"]
    assert f"<title>Q8_0.gguf, letters: {better.found.by_class[0].words}</title>" in page


def test_the_page_begins_with_what_it_says(evaluation: Evaluation, page: str) -> None:
    said = page[: page.index("<table>")]
    for each in evaluation.comparisons:
        assert each.words in said
    assert "Of 3 files, Q8_0.gguf is nearest to the base" in said
    assert "The noise floor, by which the base itself diverges through rounding, is 0.00" in said
    assert "Q8_0.gguf is better than IQ3_XXS.gguf" in said
    assert "Better on all classes." in said


@pytest.mark.slow
def test_the_page_says_of_the_noise_floor_what_is_there(evaluation: Evaluation, page: str) -> None:
    assert "What the grey steps cover is noise." in page
    none = {name: replace(each, noise=None) for name, each in evaluation.by_class.items()}
    unmeasured = report_page(replace(evaluation, by_class=none))
    assert "The noise floor was not measured (--noise-floor)." in unmeasured
    assert "grey" not in unmeasured


def test_the_page_says_that_intervals_by_class_are_corrected(evaluation: Evaluation, page: str) -> None:
    assert "Intervals and verdicts by class are corrected for the number of classes" in page
    (first, _) = evaluation.to_json()["comparisons"]
    assert first["all"]["level"] == 0.95
    assert [each["level"] for each in first["classes"].values()] == 3 * [pytest.approx(1 - 0.05 / 3)]


def test_identifiers_are_unique_and_nothing_is_loaded(page: str) -> None:
    counts = Counter(
        element.get("id") for svg in drawings(page) for element in svg.iter() if element.get("id") is not None
    )
    assert {name for name, count in counts.items() if count > 1} == set()
    assert not re.search(r"#00ff\w\w", page), "a colour that stands for a name is left"
    assert not re.search(r'(src|href)="(?!#)', re.sub(r'xmlns(:\w+)?="[^"]*"', "", page))


def test_the_worst_passage_of_each_class_is_shown(page: str) -> None:
    worst = page[page.index("Where a file is worst") :]
    for name in CLASSES:
        assert worst.count(f'<p class="note">{name}: KLD ') == 3, "once for each file"


def test_terminal_and_json_have_the_floor_by_class(evaluation: Evaluation) -> None:
    lines, found = evaluation.lines(), evaluation.to_json()
    floor = found["noise_floor"]
    assert floor["classes"].keys() == set(CLASSES)
    assert floor["all"] == pytest.approx(sum(each["kld"] for each in floor["classes"].values()) / 3)
    start = next(number for number, line in enumerate(lines) if line.startswith("noise floor "))
    assert [line.split()[0] for line in lines[start + 1 : start + 4]] == list(CLASSES)
    assert {each["path"] for each in found["comparisons"]} == {
        str(file.path) for file in evaluation.models if file.path.name != "IQ3_XXS.gguf"
    }


def written(evaluation: Evaluation, path: Path, **changes: Any) -> Path:
    """Write the JSON of an evaluation, after changes to what it says of its first class."""
    content = evaluation.to_json()
    content["suite"]["classes"][0] |= changes
    path.write_text(json.dumps(content))
    return path


@pytest.mark.slow
def test_files_of_an_earlier_evaluation_stand_beside(evaluation: Evaluation, tmp_path: Path) -> None:
    earlier = read_report(written(evaluation, tmp_path / "stock.json"))
    page = report_page(evaluation, [earlier])
    assert "Hollow: files of stock.json." in page
    klds = [figures["all"].kld.value for figures in evaluation.figures]
    assert [each.kld for each in earlier.files] == klds


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sha256": "0"}, r"stock\.json: class letters: measured on another text \(sha256 0, here "),
        ({"n_chunks": 1}, r"stock\.json: class letters: measured on 1 chunks of the text, here \d"),
        ({"name": "poems"}, r"stock\.json: not measured on the class letters"),
        ({"base_ppl": 1.5}, r"stock\.json: measured against another base \(PPL 1\.5000, here "),
    ],
)
def test_numbers_that_do_not_compare_are_refused(
    changes: dict[str, Any], message: str, evaluation: Evaluation, tmp_path: Path
) -> None:
    earlier = read_report(written(evaluation, tmp_path / "stock.json", **changes))
    with pytest.raises(BadRequest, match=message):
        report_page(evaluation, [earlier])


def test_other_classes_are_refused_before_anything_is_computed(
    evaluation: Evaluation, tmp_path: Path
) -> None:
    earlier = read_report(written(evaluation, tmp_path / "stock.json"))
    refuse_other_classes(earlier, CLASSES)
    with pytest.raises(BadRequest, match=r"measured on classes that are not here: manual, tales"):
        refuse_other_classes(earlier, ["letters"])
    alone = replace(earlier, texts=(replace(earlier.texts[0], name=None),))
    with pytest.raises(BadRequest, match=r"stock\.json: measured on one text"):
        refuse_other_classes(alone, CLASSES)


def test_the_command_writes_the_page(
    made: Made, suite: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [str(made("F32")), str(made("Q8_0")), "--suite", str(suite), "--quick", "--quiet"]
    stock, page = tmp_path / "stock.json", tmp_path / "r.html"
    assert main([*words, "--json", str(stock)]) == 0
    assert main([*words, "--html", str(page), "--compare-with", str(stock)]) == 0
    assert "Divergence by class" in page.read_text(encoding="utf-8")
    assert main([*words[:4], "--quiet", "--html", str(page), "--compare-with", str(stock), "--force"]) == 1
    assert "class letters: measured on" in capsys.readouterr().err
