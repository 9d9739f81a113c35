"""The picture of a choice of types: divergence against size."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from gguf_tools.errors import BadRequest
from gguf_tools.files.atomic_write import whole_file
from imatrix.evaluate.report.charts import label_numbers, label_sizes
from quantize.size.solve import Sized

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
