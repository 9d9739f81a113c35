"""Labels of a report's charts: numbers that people can read, and names that don't hide each other."""

from __future__ import annotations

import math
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Sequence
from itertools import combinations, pairwise
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("matplotlib")

from quality.drift import LayerDrift
from quality.evaluation import EvaluatedModel
from quality.report.charts import (
    NARROW,
    WIDE,
    Canvas,
    drawing,
    drift_chart,
    label_numbers,
    label_points,
    label_sizes,
    log_ticks,
    routing_chart,
    size_chart,
    tokens_chart,
)
from quality.report.points import Point
from tests.quality.token_values import token_values

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
NUMBER = re.compile(r"\d+(\.\d+)?(e-?\d+)?( [KMG]iB)?")
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
