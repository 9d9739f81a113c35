"""Charts that stand alone: files for a README, and predicted divergence for choices of types."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from convert.card.facts import read_report
from gguf_tools.drawing import CHOSEN, MARK, Canvas, drawn_file, require_matplotlib, standalone_svg
from gguf_tools.text import printable
from imatrix.evaluate.report.charts import (
    BELOW_AXES,
    BESIDE_AXES,
    WIDE,
    label_numbers,
    label_points,
    label_sizes,
    legend,
    size_chart,
)
from imatrix.evaluate.report.points import report_points
from quantize.size.solve import Sized

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def size_chart_file(report: Path) -> str:
    """Draw the files of an evaluation by size and divergence.

    report  what `evaluate --json` has written
    raises  BadRequest for a file that is something else, and without matplotlib
    """
    require_matplotlib("a chart")
    points = sorted(report_points(read_report(report), 0), key=lambda point: point.n_bytes)
    return standalone_svg(size_chart(points, "", WIDE))


def may_be_written(path: Path) -> bool:
    """Whether a chart may be written: there is no file, or it is one of our charts."""
    if path.is_symlink() or not path.is_file():
        return not os.path.lexists(path)
    with path.open("rb") as file:
        return file.read(len(MARK.encode())) == MARK.encode()


@dataclass(frozen=True)
class Curve:
    """Files by size in bytes and divergence, joined by a line; names stand beside their points.

    colour  one that the settings of `drawing` know
    """

    label: str
    colour: str
    marker: str
    marker_size: float
    points: Sequence[tuple[float, float]]
    names: Sequence[str] = ()


def draw_curves(figure: Figure, curves: Sequence[Curve], canvas: Canvas, labels: tuple[str, str]) -> None:
    """Draw curves over logarithmic axes; `labels` are those of sizes and of divergences."""
    axes = figure.subplots()
    for each in curves:
        axes.plot(
            *zip(*each.points, strict=True), label=each.label, color=each.colour, linewidth=2,
            marker=each.marker, markersize=each.marker_size,
        )  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    label_sizes(axes.xaxis, canvas.width - BESIDE_AXES)
    label_numbers(axes.yaxis, canvas.height - BELOW_AXES)
    axes.grid(visible=True, linewidth=0.8)
    axes.set_xlabel(labels[0])
    axes.set_ylabel(labels[1])
    legend(figure, axes, canvas)
    named = [(*at, name) for each in curves for at, name in zip(each.points, each.names, strict=False)]
    label_points(figure, axes, named, [each.points for each in curves])


def plot_curve(points: Sequence[tuple[int, float]], sized: Sized, path: Path) -> None:
    """Write an SVG (or what else the path's ending says) of divergence against size, both logarithmic.

    points  (bytes of the file, predicted divergence)
    raises  BadRequest without matplotlib or for an unknown ending, OutputError when it can't be written
    """
    require_matplotlib("--curve")
    here = [(sized.total_bytes, sized.chosen.predicted)]
    curves = [
        Curve("best predicted", CHOSEN, "o", 6, points),
        Curve(printable(sized.mixture.name), CHOSEN, "*", 18, here),
    ]
    labels = "size of the file", "predicted divergence, nats a token"
    title = "predicted divergence by size: less is better"
    with drawn_file(path, WIDE, title) as figure:
        draw_curves(figure, curves, WIDE, labels)
        figure.axes[0].set_title(title)
