"""The predicted divergence of many sizes as a curve, with the chosen file on it."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from calibrate.size.solve import Sized
from gguf_tools.errors import BadRequest
from gguf_tools.files.atomic_write import whole_file


def plot_curve(points: Sequence[tuple[int, float]], sized: Sized, path: Path) -> None:
    """Write an SVG (or what else the path's ending says) of divergence against size, both logarithmic.

    points  (bytes of the file, predicted divergence)
    raises  BadRequest without matplotlib or for an unknown ending, OutputError when it can't be written
    """
    if find_spec("matplotlib") is None:
        raise BadRequest("--curve needs matplotlib: pip install matplotlib")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    mebibytes = [n_bytes / 2**20 for n_bytes, _ in points]
    axes.plot(mebibytes, [divergence for _, divergence in points], marker="o", label="best predicted")
    axes.plot(
        [sized.total_bytes / 2**20], [sized.chosen.predicted], marker="*", markersize=14,
        linestyle="", label=sized.mixture.name,
    )  # fmt: skip
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("size of the file, MiB")
    axes.set_ylabel("predicted divergence, nats a token")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.xaxis.set_minor_formatter(lambda value, _: f"{value:g}")
    axes.grid(which="both", alpha=0.3)
    axes.legend()
    form = path.suffix.removeprefix(".") or "svg"
    known = figure.canvas.get_supported_filetypes()
    if form not in known:
        raise BadRequest(f"{path}: a picture can't be {form!r}, expected one of {', '.join(sorted(known))}")
    with whole_file(path) as file:
        figure.savefig(file, format=form)
