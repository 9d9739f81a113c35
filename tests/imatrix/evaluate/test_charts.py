"""Labels of a report's charts: numbers that people can read, and names that don't hide each other."""

from __future__ import annotations

import math
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("matplotlib")

from gguf_tools.drawing import SERIES, Canvas, drawing
from gguf_tools.web_page import DARK, LIGHT
from imatrix.evaluate.drift import LayerDrift
from imatrix.evaluate.evaluation import EvaluatedModel
from imatrix.evaluate.report.charts import (
    NARROW,
    WIDE,
    drift_chart,
    label_numbers,
    label_points,
    label_sizes,
    log_ticks,
    routing_chart,
    size_chart,
    tokens_chart,
)
from imatrix.evaluate.report.class_charts import ClassRows, Mark, class_chart, floor_text
from imatrix.evaluate.report.points import Point
from tests.imatrix.evaluate.token_values import token_values

FILES = {
    "Q2_K": (2.63, 0.09), "Q4_K_M": (4.85, 0.0103), "Q4_K_S": (4.6, 0.0131), "IQ4_XS": (4.3, 0.0139),
    "Q5_K_M": (5.7, 0.0031), "Q5_K_S": (5.55, 0.0037), "Q6_K": (6.6, 0.0009), "Q8_0": (8.5, 0.0002),
    "IQ3_XXS": (3.1, 0.052), "IQ3_M": (3.7, 0.029), "Q3_K_M": (3.9, 0.031), "IQ4_NL": (4.55, 0.0135),
}  # fmt: skip
"""Bits per weight and divergence of twelve files; three of them are nearly the same."""

POINTS = [
    Point(f"DeepSeek-V2-Lite-{name}.gguf", round(2e9 * bits), kld, 0) for name, (bits, kld) in FILES.items()
]
SVG = "{http://www.w3.org/2000/svg}"
NUMBER = re.compile(r"\d+(\.\d+)?( [KMG]iB)?")
CANVASES = pytest.mark.parametrize("canvas", [WIDE, NARROW], ids=lambda canvas: canvas.name)


def models(n: int, lowest: float, highest: float) -> list[EvaluatedModel]:
    """Return files whose drift, routing and divergence of tokens lie between two values."""
    made = []
    for name in list(FILES)[:n]:
        values = np.geomspace(lowest, highest, 27)
        layers = tuple(LayerDrift(layer, value, value) for layer, value in enumerate(values))
        zeros, kld = np.zeros((3, 9)), values.reshape(3, 9)
        tokens = token_values(zeros, zeros, kld, zeros == 0)
        made.append(EvaluatedModel(Path(f"{name}.gguf"), 10**9, 4.5, None, layers, None, tokens, ()))
    return made


def labels(svg: str, axis: str) -> list[str]:
    """Return what stands beside the ticks of the axis "x" or "y"."""
    root = ElementTree.fromstring(svg)
    ticks = [group for group in root.iter(f"{SVG}g") if re.search(rf"-{axis}tick_\d+$", group.get("id", ""))]
    return ["".join(text.itertext()) for tick in ticks for text in tick.iter(f"{SVG}text")]


Chart = Callable[[Sequence[EvaluatedModel], str, Canvas], str]


@CANVASES
@pytest.mark.parametrize("chart", [drift_chart, routing_chart, tokens_chart])
@pytest.mark.parametrize(
    ("n_files", "lowest", "highest"),
    [(1, 0.21, 0.35), (2, 0.0912, 0.0913), (1, 0.4, 0.4), (12, 1e-7, 0.9), (2, 3e-3, 0.04)],
)
def test_numbers_are_readable(
    n_files: int, lowest: float, highest: float, chart: Chart, canvas: Canvas
) -> None:
    svg = chart(models(n_files, lowest, highest), "p-", canvas)
    assert "math" not in svg
    assert len(labels(svg, "y")) >= 2
    for axis in "xy":
        found = labels(svg, axis)
        assert len(found) <= 12
        assert all(NUMBER.fullmatch(text) for text in found), found
        assert sorted(set(map(float, found))) == list(map(float, found))


@CANVASES
@pytest.mark.parametrize("n_files", [1, 2, 12])
def test_sizes_and_divergences_are_readable(n_files: int, canvas: Canvas) -> None:
    svg = size_chart(POINTS[-n_files:], "p-", canvas)
    for axis in "xy":
        found = labels(svg, axis)
        assert len(found) >= 3
        assert all(NUMBER.fullmatch(text) for text in found), found
        assert len(set(found)) == len(found)


def test_long_axes_get_no_steps_of_equal_size() -> None:
    """Those would all stand at the right end, over each other."""
    assert log_ticks(1e-7, 9e4, 10, ((1, 2, 5), (1,)), 0.4) == [1e-5, 1]


@pytest.mark.parametrize("highest", [1.01, 1.3, 3, 11, 1e3, 1e9])
def test_ticks_are_as_near_as_they_may_be(highest: float) -> None:
    ticks = log_ticks(1, highest, 10, ((1, 2, 5), (1,)), 0.1)
    assert len(ticks) >= 3
    nearest = min(math.log(above / below) for below, above in pairwise(ticks))
    assert nearest / math.log(highest) >= 0.1


@CANVASES
def test_names_of_near_points_do_not_overlap(canvas: Canvas) -> None:
    places = [(point.n_bytes, point.kld, name) for point, name in zip(POINTS, FILES, strict=True)]
    with drawing(canvas) as figure:
        axes = figure.subplots()
        axes.set(xscale="log", yscale="log", xlim=(4e9, 24e9), ylim=(1e-4, 0.2))
        label_sizes(axes.xaxis, canvas.width)
        label_numbers(axes.yaxis, canvas.height)
        label_points(figure, axes, places)
        written = [text for text in axes.texts if text.get_text()]
        boxes = [text.get_window_extent() for text in written]
        middles = axes.transData.transform([place[:2] for place in places])
    assert {text.get_text() for text in written} == set(FILES)
    assert not any(a.overlaps(b) for a, b in combinations(boxes, 2))
    assert not any(box.contains(x, y) for box in boxes for x, y in middles)


def test_what_fits_nowhere_is_left_out() -> None:
    with drawing(NARROW) as figure:
        axes = figure.subplots()
        axes.set(xlim=(0, 2), ylim=(0, 2))
        label_points(figure, axes, [(1, 1, "x" * 200), (1, 1, "y")])
    assert [text.get_text() for text in axes.texts if text.get_text()] == ["y"]


def class_rows(n_files: int, **changes: Any) -> ClassRows:
    """Return files on four classes and over all, whose divergences lie near to each other."""
    names = list(FILES)[:n_files]
    marks = []
    for place, name in enumerate(names):
        klds = [0.01 * 1.3**row * (1 + 0.2 * place) for row in range(5)]
        marks.append([Mark(kld, 0.9 * kld, 1.1 * kld, f"{name} {row}") for row, kld in enumerate(klds)])
    rows = ClassRows(
        ["prose", "code", "chat", "maths", "all"], list(enumerate(names)), marks, "mean KLD", has_total=True
    )
    return replace(rows, **changes)


@CANVASES
@pytest.mark.parametrize("n_files", [1, 2, 12])
def test_classes_are_rows(n_files: int, canvas: Canvas) -> None:
    svg = class_chart(class_rows(n_files), "p-", canvas)
    assert labels(svg, "y") == ["prose", "code", "chat", "maths", "all"]
    assert len(labels(svg, "x")) >= 2
    assert all(NUMBER.fullmatch(text) for text in labels(svg, "x"))
    titles = [title.text for title in ElementTree.fromstring(svg).iter(f"{SVG}title")]
    assert sorted(titles) == sorted(f"{name} {row}" for name in list(FILES)[:n_files] for row in range(5))


def middles(svg: str, place: int, row: int) -> tuple[float, float]:
    """Return where a mark stands."""
    root = ElementTree.fromstring(svg)
    (mark,) = (group for group in root.iter(f"{SVG}g") if group.get("id") == f"p-mark{place}-{row}")
    (use,) = mark.iter(f"{SVG}use")
    return float(use.get("x", "")), float(use.get("y", ""))


def test_marks_of_a_row_do_not_hide_each_other() -> None:
    svg = class_chart(class_rows(3), "p-", WIDE)
    for row in range(5):
        for one, other in combinations([middles(svg, place, row) for place in range(3)], 2):
            assert math.dist(one, other) > 7


def test_marks_far_apart_stand_on_one_line() -> None:
    far = [[Mark(10.0**-place, 0.9 * 10.0**-place, 1.1 * 10.0**-place, "")] * 5 for place in range(3)]
    svg = class_chart(class_rows(3, marks=far), "p-", WIDE)
    assert len({middles(svg, place, 2)[1] for place in range(3)}) == 1


@CANVASES
def test_what_is_not_known_is_left_out(canvas: Canvas) -> None:
    """A class of one chunk has no interval; a file that equals the base has no place on a log axis."""
    unknown = [[Mark(0.01, math.nan, math.nan, "a")] * 5, [Mark(0.0, 0.0, 0.0, "b")] * 5]
    for scale in ("log", "linear"):
        svg = class_chart(class_rows(2, marks=unknown, scale=scale, line=1.0), "p-", canvas)
        assert "nan" not in svg.lower()


@CANVASES
def test_shares_are_shown_in_percent(canvas: Canvas) -> None:
    marks = [[Mark(0.004 * place, 0.0, 0.008 * place, "")] * 5 for place in range(2)]
    svg = class_chart(class_rows(2, marks=marks, scale="linear"), "p-", canvas)
    found = labels(svg, "x")
    assert 3 <= len(found) <= 7
    assert all(re.fullmatch(r"0\.\d+%", text) for text in found), found


@CANVASES
def test_shares_that_are_all_zero_have_no_negative_label(canvas: Canvas) -> None:
    marks = [[Mark(0.0, 0.0, 0.0, "")] * 5 for _ in range(2)]
    found = labels(class_chart(class_rows(2, marks=marks, scale="linear"), "p-", canvas), "x")
    assert len(found) >= 2
    assert all(re.fullmatch(r"0\.\d+%", text) for text in found), found


def test_a_noise_floor_is_drawn_where_it_is_near() -> None:
    def shaded(floors: list[float] | None) -> int:
        return class_chart(class_rows(2, floors=floors), "p-", WIDE).count("FillBetween")

    near, far = (shaded([floor] * 5) for floor in (0.005, 1e-6))
    assert near - shaded(None) == 5
    assert far == shaded(None)
    said = [floor_text(class_rows(2, floors=floors)) for floors in ([0.005] * 5, [1e-6] * 5, None)]
    assert said == [
        "What the grey steps cover is noise.",
        "The noise floor, 1e-06 at most, is below what the axis shows.",
        "The noise floor was not measured (--noise-floor).",
    ]


# ---- Colours

BLINDNESS = {
    "none": np.eye(3),
    "red": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216],
            [-0.003882, -0.048116, 1.051998]],
    "green": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413],
              [-0.01182, 0.04294, 0.968881]],
}  # fmt: skip
"""What is left of linear RGB: Machado, Oliveira and Fernandes, 2009, severity 1."""
TO_LMS = [[0.4122214708, 0.5363325363, 0.0514459929], [0.2119034982, 0.6806995451, 0.1073969566],
          [0.0883024619, 0.2817188376, 0.6299787005]]  # fmt: skip
TO_LAB = [[0.2104542553, 0.793617785, -0.0040720468], [1.9779984951, -2.428592205, 0.4505937099],
          [0.0259040371, 0.7827717662, -0.808675766]]  # fmt: skip
"""OKLab: Ottosson, 2020."""


def linear(colour: str) -> np.ndarray:
    """Return a colour as linear RGB."""
    parts = np.array([int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)])
    return np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)


def oklab(rgb: np.ndarray) -> np.ndarray:
    return np.cbrt(np.clip(rgb, 0, 1) @ np.transpose(TO_LMS)) @ np.transpose(TO_LAB)


@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=["light", "dark"])
def test_colours_of_files_differ_for_everybody(theme: str) -> None:
    found = dict(re.findall(r"--([\w-]+): (#\w+);", theme))
    colours = np.array([linear(found[f"series-{number}"]) for number in range(len(SERIES))])
    assert len(SERIES) == 12
    for name, seen in BLINDNESS.items():
        labs = oklab(colours @ np.transpose(seen))
        nearest = min(math.dist(one, other) for one, other in combinations(labs, 2))
        assert nearest > (0.15 if name == "none" else 0.09), name
    luminances = [rgb @ [0.2126, 0.7152, 0.0722] for rgb in (*colours, linear(found["surface"]))]
    *own, surface = luminances
    contrasts = [(max(each, surface) + 0.05) / (min(each, surface) + 0.05) for each in own]
    assert min(contrasts) > 3
