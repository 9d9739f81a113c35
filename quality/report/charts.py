"""The charts of a report, each a function from frozen values to SVG.

Every chart comes in two sizes, for a wide page and for a telephone: text that is scaled down to a third can't
be read.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np

from gguf_tools.errors import BadRequest
from gguf_tools.text import printable, size_text
from quality.evaluation import EvaluatedModel
from quality.report.point_labels import label_points
from quality.report.points import Point, pareto_front, short_names
from quality.report.svg import MUTED, SERIES, SETTINGS, SURFACE, svg_text
from quality.report.ticks import label_numbers, label_sizes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MARKERS = (("o", 8), ("s", 7), ("D", 7), ("^", 8), ("v", 8), ("P", 9), ("X", 9), ("*", 13))
"""Markers and their sizes in points, at which they look equally large."""

_DASHES = ("-", "--", ":", "-.")

_SMALLEST_KLD = 1e-9
"""A divergence below this is rounding, and has no place on a logarithmic axis."""

_N_STEPS = 200
"""Number of points of a curve."""

_BESIDE_AXES, _BELOW_AXES, _A_LAYER = 70, 90, 45
"""About what labels and legend take beside and below the axes, and the least width of a layer's label."""


@dataclass(frozen=True)
class Canvas:
    """The size that a chart is drawn at, in the page's pixels; `name` is a class of the style sheet."""

    name: str
    width: int
    height: int


WIDE, NARROW = Canvas("wide", 540, 400), Canvas("narrow", 356, 380)


def require_matplotlib() -> None:
    """Raise BadRequest saying what to install where matplotlib is missing."""
    if find_spec("matplotlib") is None:
        raise BadRequest("--html needs matplotlib: pip install 'gguf-tools[report]'")


def size_chart(points: Sequence[Point], prefix: str, canvas: Canvas) -> str:
    """Return the divergence of files against their sizes, with the front of those that no other beats.

    points  of the newest evaluation (group 0) in its order, and of earlier ones
    """
    shown = [point for point in points if point.kld > _SMALLEST_KLD]
    names = dict(zip(map(id, points), short_names([printable(point.name) for point in points]), strict=True))
    titles = {}
    with drawing(canvas) as figure:
        axes = figure.subplots()
        _log_axes(axes, shown, canvas)
        axes.set_xlabel("size")
        axes.set_ylabel("mean KLD")
        front = pareto_front(shown)
        sizes, klds = [point.n_bytes for point in front], [point.kld for point in front]
        axes.plot(sizes, klds, color=MUTED, linewidth=1, zorder=1)
        for place, point in enumerate(shown):
            style = _Style.of(points.index(point)) if point.group == 0 else _Style(SURFACE, "-", "o", 8)
            (drawn,) = axes.plot(
                [point.n_bytes], [point.kld], marker=style.marker, markersize=style.marker_size,
                color=style.colour, markeredgecolor=SURFACE if point.group == 0 else MUTED,
                markeredgewidth=0.8 if point.group == 0 else 1.2,
                linestyle="", zorder=3 if point.group == 0 else 2,
            )  # fmt: skip
            drawn.set_gid(f"point{place}")
            what = f"{size_text(point.n_bytes)}, KLD {point.kld:.6f}"
            titles[f"point{place}"] = f"{printable(point.name)}: {what}"
        label_points(figure, axes, [(point.n_bytes, point.kld, names[id(point)]) for point in shown])
        return svg_text(figure, prefix, "Mean KLD against size of each file, logarithmic", titles)


def tokens_chart(models: Sequence[EvaluatedModel], prefix: str, canvas: Canvas) -> str:
    """Return, for each model, the share of tokens whose divergence exceeds a value."""
    with drawing(canvas) as figure:
        axes = figure.subplots()
        for number, (model, name) in enumerate(_named(models)):
            values = np.sort(model.tokens.kld.ravel())
            above = values[values > _SMALLEST_KLD]
            if above.size:
                steps = np.geomspace(above[above.size // 100], above[-1], _N_STEPS)
                share = 1 - np.searchsorted(values, steps, side="left") / values.size
                _Style.of(number).line(axes, steps, share, name)
        axes.set_xscale("log")
        axes.set_yscale("log")
        label_numbers(axes.xaxis, canvas.width - _BESIDE_AXES)
        label_numbers(axes.yaxis, canvas.height - _BELOW_AXES)
        axes.grid(visible=True, linewidth=0.8)
        axes.set_xlabel("KLD of a token")
        axes.set_ylabel("share of tokens above it")
        _legend(figure, axes, canvas)
        return svg_text(figure, prefix, "Share of tokens whose KLD exceeds a value, by file", {})


def drift_chart(models: Sequence[EvaluatedModel], prefix: str, canvas: Canvas) -> str:
    """Return the drift of each model's hidden states, layer by layer."""
    lines = [
        ([layer.layer for layer in model.layers], [layer.drift for layer in model.layers]) for model in models
    ]
    return _layers_chart(models, lines, "drift of hidden states", prefix, canvas)


def routing_chart(models: Sequence[EvaluatedModel], prefix: str, canvas: Canvas) -> str:
    """Return the share of expert choices that changed in each model, layer by layer."""
    lines = [
        (
            [layer.layer for layer in model.layers if layer.routing_changed is not None],
            [layer.routing_changed for layer in model.layers if layer.routing_changed is not None],
        )
        for model in models
    ]
    return _layers_chart(models, lines, "expert choices changed", prefix, canvas)


def _layers_chart(
    models: Sequence[EvaluatedModel],
    lines: Sequence[tuple[list[int], list[float]]],
    label: str,
    prefix: str,
    canvas: Canvas,
) -> str:
    from matplotlib.ticker import MaxNLocator

    with drawing(canvas) as figure:
        axes = figure.subplots()
        for number, ((_, name), (layers, values)) in enumerate(zip(_named(models), lines, strict=True)):
            heights = np.array([value if 0 < value < math.inf else math.nan for value in values])
            marker = _Style.of(number).marker if len(layers) <= 16 else ""
            _Style.of(number).line(axes, layers, heights, name, marker=marker, markersize=5)
        if any(0 < value < math.inf for _, values in lines for value in values):
            axes.set_yscale("log")
            label_numbers(axes.yaxis, canvas.height - _BELOW_AXES)
        axes.xaxis.set_major_locator(MaxNLocator(canvas.width // _A_LAYER, integer=True))
        axes.grid(visible=True, linewidth=0.8)
        axes.set_xlabel("layer")
        axes.set_ylabel(label)
        _legend(figure, axes, canvas)
        return svg_text(figure, prefix, f"{label}, layer by layer, by file", {})


@dataclass(frozen=True)
class _Style:
    """How a model is drawn in all charts."""

    colour: str
    dashes: str
    marker: str
    marker_size: float

    @classmethod
    def of(cls, number: int) -> _Style:
        """Return the style of a model: eight colours, and then the same with other lines."""
        turn, place = divmod(number, len(SERIES))
        return cls(SERIES[place], _DASHES[turn % len(_DASHES)], *_MARKERS[(place + turn) % len(_MARKERS)])

    def line(self, axes: Axes, x: Any, y: Any, name: str, **more: Any) -> None:
        axes.plot(x, y, color=self.colour, linestyle=self.dashes, linewidth=2, label=name, **more)


@contextmanager
def drawing(canvas: Canvas) -> Iterator[Figure]:
    """Give an empty figure, and the settings that it has to be drawn under."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(SETTINGS):
        yield Figure((canvas.width / 72, canvas.height / 72), layout="constrained")


def _named(models: Sequence[EvaluatedModel]) -> list[tuple[EvaluatedModel, str]]:
    names = short_names([printable(model.path.name) for model in models])
    return list(zip(models, names, strict=True))


def _log_axes(axes: Axes, points: Sequence[Point], canvas: Canvas) -> None:
    """Make both axes logarithmic, with some room around the points and ticks that people can read."""
    sizes, klds = [point.n_bytes for point in points], [point.kld for point in points]
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    if points:
        axes.set_xlim(min(sizes) / 1.25, max(sizes) * 1.4)
        axes.set_ylim(min(klds) / 2, max(klds) * 2)
    label_sizes(axes.xaxis, canvas.width - _BESIDE_AXES)
    label_numbers(axes.yaxis, canvas.height - _BELOW_AXES)
    axes.grid(visible=True, linewidth=0.8)


def _legend(figure: Figure, axes: Axes, canvas: Canvas) -> None:
    """Put the names of all lines below a chart."""
    _, names = axes.get_legend_handles_labels()
    if names:
        letters = max(map(len, names))
        columns = max(1, min(len(names), canvas.width // (52 + 7 * letters)))
        figure.legend(loc="outside lower center", ncols=columns)
