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
from quality.report.points import Point, pareto_front, short_names
from quality.report.svg import INK, MUTED, SERIES, SETTINGS, SURFACE, svg_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MARKERS = "osD^vPX*"
_DASHES = ("-", "--", ":", "-.")

_SMALLEST_KLD = 1e-9
"""A divergence below this is rounding, and has no place on a logarithmic axis."""

_N_STEPS = 200
"""Number of points of a curve."""


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
            style = _Style.of(points.index(point)) if point.group == 0 else _Style(SURFACE, "-", "o")
            (drawn,) = axes.plot(
                [point.n_bytes], [point.kld], marker=style.marker, markersize=8, color=style.colour,
                markeredgecolor=SURFACE if point.group == 0 else MUTED, markeredgewidth=1.2,
                linestyle="", zorder=3 if point.group == 0 else 2,
            )  # fmt: skip
            drawn.set_gid(f"point{place}")
            what = f"{size_text(point.n_bytes)}, KLD {point.kld:.6f}"
            titles[f"point{place}"] = f"{printable(point.name)}: {what}"
        _label(figure, axes, [(point.n_bytes, point.kld, names[id(point)]) for point in shown])
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
        axes.xaxis.set_major_formatter(_number)
        axes.yaxis.set_major_formatter(_number)
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
            axes.yaxis.set_major_formatter(_number)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
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

    @classmethod
    def of(cls, number: int) -> _Style:
        """Return the style of a model: eight colours, and then the same with other lines."""
        turn, place = divmod(number, len(SERIES))
        return cls(SERIES[place], _DASHES[turn % len(_DASHES)], _MARKERS[(place + turn) % len(_MARKERS)])

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
    from matplotlib.ticker import NullFormatter

    sizes, klds = [point.n_bytes for point in points], [point.kld for point in points]
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    if points:
        axes.set_xlim(min(sizes) / 1.25, max(sizes) * 1.4)
        axes.set_ylim(min(klds) / 2, max(klds) * 2)
    ticks = _size_ticks(*axes.get_xlim(), most=canvas.width // 70)
    axes.set_xticks(ticks, [_size_label(tick) for tick in ticks])
    axes.set_xticks([], minor=True)
    axes.yaxis.set_major_formatter(_number)
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.grid(visible=True, linewidth=0.8)


def _size_ticks(smallest: float, largest: float, most: int) -> list[float]:
    """Return round sizes between two, `most` at most: powers of two, and if there is room what is between."""
    powers = range(math.floor(math.log2(smallest)), math.ceil(math.log2(largest)) + 1)
    for parts in ((1.0, 1.125, 1.25, 1.375, 1.5, 1.75), (1.0, 1.25, 1.5, 1.75), (1.0, 1.5), (1.0,)):
        ticks = [part * 2.0**power for power in powers for part in parts]
        ticks = [tick for tick in ticks if smallest <= tick <= largest]
        if len(ticks) <= most:
            return ticks
    return ticks[:: -(-len(ticks) // most)]


def _size_label(n_bytes: float) -> str:
    number, unit = size_text(n_bytes).split(" ")
    return f"{float(number):g} {unit}"


def _number(value: float, _: object = None) -> str:
    """Return a tick as people write it: 0.001, but 1e-5.

    >>> _number(1e-5), _number(0.002)
    ('1e-5', '0.002')
    """
    return f"{value:.3g}".replace("e-0", "e-")


def _label(figure: Figure, axes: Axes, places: Sequence[tuple[float, float, str]]) -> None:
    """Write names beside points, where they hide nothing; one that fits nowhere is left to the pointer."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.transforms import Bbox

    renderer = FigureCanvasAgg(figure).get_renderer()
    figure.draw_without_rendering()
    frame = axes.get_window_extent(renderer)
    dots = axes.transData.transform([(x, y) for x, y, _ in places] or np.empty((0, 2)))
    taken = [Bbox.from_bounds(x - 5, y - 5, 10, 10) for x, y in dots]
    for x, y, name in places:
        for dx, dy, across, up in (
            (9, 0, "left", "center"), (0, 9, "center", "bottom"), (-9, 0, "right", "center"),
            (0, -9, "center", "top"), (7, 7, "left", "bottom"), (-7, -7, "right", "top"),
        ):  # fmt: skip
            text = axes.annotate(
                name, (x, y), (dx, dy), textcoords="offset points", ha=across, va=up, color=INK, fontsize=11
            )
            box = text.get_window_extent(renderer)
            inside = frame.x0 <= box.x0 and box.x1 <= frame.x1 and frame.y0 <= box.y0 and box.y1 <= frame.y1
            if inside and not box.count_overlaps(taken):
                taken.append(box)
                break
            text.remove()


def _legend(figure: Figure, axes: Axes, canvas: Canvas) -> None:
    """Put the names of all lines below a chart."""
    _, names = axes.get_legend_handles_labels()
    if names:
        letters = max(map(len, names))
        columns = max(1, min(len(names), canvas.width // (52 + 7 * letters)))
        figure.legend(loc="outside lower center", ncols=columns)
