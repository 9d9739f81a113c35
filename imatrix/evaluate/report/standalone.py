"""Charts that stand alone: files for a README, in colours of their own, light and dark; choices of types."""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from convert.card.facts import read_report
from gguf_tools.errors import BadRequest
from gguf_tools.files.named_files import whole_file
from gguf_tools.web_page import DARK, LIGHT
from imatrix.evaluate.report.charts import WIDE, label_numbers, label_sizes, require_matplotlib, size_chart
from imatrix.evaluate.report.points import report_points
from quantize.size.solve import Sized

MARK = "<!-- gguf-tools chart -->"
"""How our charts are told from others."""


def size_chart_file(report: Path) -> str:
    """Draw the files of an evaluation by size and divergence.

    report  what `evaluate --json` has written
    raises  BadRequest for a file that is something else, and without matplotlib
    """
    require_matplotlib()
    points = sorted(report_points(read_report(report), 0), key=lambda point: point.n_bytes)
    svg = size_chart(points, "", WIDE)
    style = (
        f"<style>:root {{ {LIGHT} }} svg {{ background: var(--surface); }}"
        f" text {{ font-family: system-ui, sans-serif !important; }}"
        f" @media (prefers-color-scheme: dark) {{ :root {{ {DARK} }} }}</style>"
    )
    begin = svg.index(">") + 1
    return f"{MARK}\n{svg[:begin]}{style}{svg[begin:]}\n"


def may_be_written(path: Path) -> bool:
    """Whether a chart may be written: there is no file, or it is one of our charts."""
    if path.is_symlink() or not path.is_file():
        return not os.path.lexists(path)
    with path.open("rb") as file:
        return file.read(len(MARK.encode())) == MARK.encode()


_POINTS = 504, 324
"""Width and height of the picture, in points."""


def plot_curve(points: Sequence[tuple[int, float]], sized: Sized, path: Path) -> None:
    """Write an SVG (or what else the path's ending says) of divergence against size, both logarithmic.

    points  (bytes of the file, predicted divergence)
    raises  BadRequest without matplotlib or for an unknown ending, OutputError when it can't be written
    """
    if find_spec("matplotlib") is None:
        raise BadRequest("--curve needs matplotlib: pip install matplotlib")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_POINTS[0] / 72, _POINTS[1] / 72), layout="constrained")
    axes = figure.subplots()
    axes.plot(*zip(*points, strict=True), marker="o", label="best predicted")
    axes.plot(
        [sized.total_bytes], [sized.chosen.predicted], marker="*", markersize=14,
        linestyle="", label=sized.mixture.name,
    )  # fmt: skip
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("size of the file")
    axes.set_ylabel("predicted divergence, nats a token")
    label_sizes(axes.xaxis, 0.85 * _POINTS[0])
    label_numbers(axes.yaxis, 0.85 * _POINTS[1])
    axes.grid(alpha=0.3)
    axes.legend()
    form = path.suffix.removeprefix(".") or "svg"
    known = figure.canvas.get_supported_filetypes()
    if form not in known:
        raise BadRequest(f"{path}: a picture can't be {form!r}, expected one of {', '.join(sorted(known))}")
    with whole_file(path) as file:
        figure.savefig(file, format=form)
