"""The charts of a report, each a function from frozen values to SVG.

Every chart comes in two sizes, for a wide page and for a telephone: text that is scaled down to a third can't
be read.

matplotlib labels what is between two powers of ten in a notation of its own, and only where it sees fit. So
axes get round numbers, as many as there is room for, and names stand beside points where they hide neither
points nor each other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from gguf_tools.drawing import GRID, INK, MUTED, SERIES, SURFACE, Canvas, drawing, svg_text
from gguf_tools.text import printable, size_text
from imatrix.evaluate.evaluation import EvaluatedModel
from imatrix.evaluate.report.points import Point, pareto_front, short_names

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure
    from matplotlib.transforms import Bbox


_MARKERS = (
    ("o", 8), ("s", 7), ("D", 7), ("^", 8), ("v", 8), ("P", 9), ("X", 9), ("*", 13), ("<", 8), (">", 8),
    ("p", 9), ("h", 9),
)  # fmt: skip
"""Markers and their sizes in points, at which they look equally large."""

_DASHES = ("-", "--", ":", "-.")

SMALLEST_KLD = 1e-9
"""A divergence below this is rounding, and has no place on a logarithmic axis."""

_FLOOR_WITHIN = 10
"""A noise floor is shown that is at most so many times lower than the lowest point."""

_N_STEPS = 200
"""Number of points of a curve."""

BESIDE_AXES, BELOW_AXES, _A_LAYER = 70, 90, 45
"""About what labels and legend take beside and below the axes, and the least width of a layer's label."""


WIDE, NARROW = Canvas("wide", 540, 400), Canvas("narrow", 356, 380)


def size_chart(
    points: Sequence[Point], prefix: str, canvas: Canvas, floor: float | None = None, measure: str = "KLD"
) -> str:
    """Return the divergence of files against their sizes, with the front of those that no other beats.

    points  of the newest evaluation (group 0) in its order, and of earlier ones
    floor   divergence that is noise; None: not measured
    measure name of the divergence
    """
    shown = [point for point in points if point.kld > SMALLEST_KLD]
    names = dict(zip(map(id, points), short_names([printable(point.name) for point in points]), strict=True))
    titles = {}
    with drawing(canvas) as figure:
        axes = figure.subplots()
        _log_axes(axes, shown, canvas, floor)
        axes.set_xlabel("size of the file")
        axes.set_ylabel("mean KLD, nats a token" if measure == "KLD" else f"mean {measure}")
        front = pareto_front(shown)
        sizes, klds = [point.n_bytes for point in front], [point.kld for point in front]
        axes.plot(sizes, klds, color=MUTED, linewidth=1, zorder=1)
        for place, point in enumerate(shown):
            style = Style.of(points.index(point)) if point.group == 0 else Style(SURFACE, "-", "o", 8)
            (drawn,) = axes.plot(
                [point.n_bytes], [point.kld], marker=style.marker, markersize=style.marker_size,
                color=style.colour, markeredgecolor=SURFACE if point.group == 0 else MUTED,
                markeredgewidth=0.8 if point.group == 0 else 1.2,
                linestyle="", zorder=3 if point.group == 0 else 2,
            )  # fmt: skip
            drawn.set_gid(f"point{place}")
            what = f"{size_text(point.n_bytes)}, {measure} {point.kld:.6f}"
            titles[f"point{place}"] = f"{printable(point.name)}: {what}"
        places = [(point.n_bytes, point.kld, names[id(point)]) for point in shown]
        label_points(figure, axes, places, [[*zip(sizes, klds, strict=True)]])
        return svg_text(figure, prefix, f"Mean {measure} against size of each file, logarithmic", titles)


def tokens_chart(models: Sequence[EvaluatedModel], prefix: str, canvas: Canvas) -> str:
    """Return, for each model, the share of tokens whose divergence exceeds a value."""
    with drawing(canvas) as figure:
        axes = figure.subplots()
        for number, (model, name) in enumerate(named(models)):
            values = np.sort(model.tokens.kld)
            above = values[values > SMALLEST_KLD]
            if above.size:
                steps = np.geomspace(above[above.size // 100], above[-1], _N_STEPS)
                share = 1 - np.searchsorted(values, steps, side="left") / values.size
                Style.of(number).line(axes, steps, share, name)
        axes.set_xscale("log")
        axes.set_yscale("log")
        label_numbers(axes.xaxis, canvas.width - BESIDE_AXES)
        label_numbers(axes.yaxis, canvas.height - BELOW_AXES)
        axes.grid(visible=True, linewidth=0.8)
        axes.set_xlabel("KLD of a token, nats")
        axes.set_ylabel("share of tokens above it")
        legend(figure, axes, canvas)
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
        for number, ((_, name), (layers, values)) in enumerate(zip(named(models), lines, strict=True)):
            heights = np.array([value if 0 < value < math.inf else math.nan for value in values])
            marker = Style.of(number).marker if len(layers) <= 16 else ""
            Style.of(number).line(axes, layers, heights, name, marker=marker, markersize=5)
        if any(0 < value < math.inf for _, values in lines for value in values):
            axes.set_yscale("log")
            label_numbers(axes.yaxis, canvas.height - BELOW_AXES)
        axes.xaxis.set_major_locator(MaxNLocator(canvas.width // _A_LAYER, integer=True))
        axes.grid(visible=True, linewidth=0.8)
        axes.set_xlabel("layer")
        axes.set_ylabel(label)
        legend(figure, axes, canvas)
        return svg_text(figure, prefix, f"{label}, layer by layer, by file", {})


@dataclass(frozen=True)
class Style:
    """How a model is drawn in all charts."""

    colour: str
    dashes: str
    marker: str
    marker_size: float

    @classmethod
    def of(cls, number: int) -> Style:
        """Return the style of a model: twelve colours, and then the same with other lines."""
        turn, place = divmod(number, len(SERIES))
        return cls(SERIES[place], _DASHES[turn % len(_DASHES)], *_MARKERS[(place + turn) % len(_MARKERS)])

    def line(self, axes: Axes, x: Any, y: Any, name: str, **more: Any) -> None:
        axes.plot(x, y, color=self.colour, linestyle=self.dashes, linewidth=2, label=name, **more)


def named(models: Sequence[EvaluatedModel]) -> list[tuple[EvaluatedModel, str]]:
    names = short_names([printable(model.path.name) for model in models])
    return list(zip(models, names, strict=True))


def _log_axes(axes: Axes, points: Sequence[Point], canvas: Canvas, floor: float | None) -> None:
    """Make both axes logarithmic, with some room around the points and ticks that people can read."""
    sizes, klds = [point.n_bytes for point in points], [point.kld for point in points]
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    if points:
        axes.set_xlim(min(sizes) / 1.25, max(sizes) * 1.4)
        lowest, highest = min(klds) / 2, max(klds) * 2
        if floor is not None and floor > lowest / _FLOOR_WITHIN:
            lowest = min(lowest, floor / 1.6)
            axes.axhspan(lowest, floor, color=GRID, alpha=0.7, linewidth=0, zorder=0)
            axes.annotate(
                "noise floor", (0, floor), (3, -3), xycoords=("axes fraction", "data"),
                textcoords="offset points", va="top", color=MUTED, fontsize=_FONT_SIZE,
            )  # fmt: skip
        axes.set_ylim(lowest, highest)
    label_sizes(axes.xaxis, canvas.width - BESIDE_AXES)
    label_numbers(axes.yaxis, canvas.height - BELOW_AXES)
    axes.grid(visible=True, linewidth=0.8)


def legend(figure: Figure, axes: Axes, canvas: Canvas) -> None:
    """Put the names of all lines below a chart."""
    _, names = axes.get_legend_handles_labels()
    if names:
        letters = max(map(len, names))
        rows = -(-len(names) // max(1, canvas.width // (52 + 7 * letters)))
        figure.legend(loc="outside lower center", ncols=-(-len(names) // rows))


_ENOUGH = 3
"""Fewer labels than this say little about an axis; then it gets steps of equal size."""

_IN_A_DECADE = ((1, 2, 3, 4, 5, 6, 7, 8, 9), (1, 2, 3, 5, 7), (1, 2, 5), (1, 3), (1,))
_IN_A_DOUBLING = ((1, 1.125, 1.25, 1.375, 1.5, 1.625, 1.75, 1.875), (1, 1.25, 1.5, 1.75), (1, 1.5), (1,))
"""Numbers to label between a power of the base and the next one, from many to few."""

_POINTS_A_NUMBER_ACROSS, _POINTS_A_SIZE_ACROSS, _POINTS_UP, _A_DIGIT = 56, 58, 36, 7
"""The least distance of two labels, and the width of a digit, in points."""


def label_numbers(axis: Axis, length: float) -> None:
    """Label a logarithmic axis with numbers, once its limits are final.

    length  of the axis in points
    """
    from matplotlib.axis import XAxis

    limits, gap = _limits(axis), _POINTS_UP
    if isinstance(axis, XAxis):
        powers = (number_text(10.0 ** math.floor(math.log10(limit))) for limit in limits)
        gap = max(_POINTS_A_NUMBER_ACROSS, _A_DIGIT * (1 + max(map(len, powers))))
    _label_axis(axis, log_ticks(*limits, 10, _IN_A_DECADE, gap / length), number_text)


def label_sizes(axis: Axis, length: float) -> None:
    """Label a logarithmic axis with sizes of files, in bytes; see `label_numbers`."""
    _label_axis(
        axis, log_ticks(*_limits(axis), 2, _IN_A_DOUBLING, _POINTS_A_SIZE_ACROSS / length), _size_label
    )


def log_ticks(
    lowest: float, highest: float, base: int, choices: Sequence[Sequence[float]], gap: float
) -> list[float]:
    """Return round numbers between two, no pair of them nearer to each other than `gap`.

    choices  the numbers to label between a power of `base` and the next, from many to few
    gap      a share of the axis
    """
    powers = range(math.floor(math.log(lowest, base)), math.ceil(math.log(highest, base)) + 1)
    for ticks in (
        *([part * float(base) ** power for power in powers for part in parts] for parts in choices),
        *([float(base) ** power for power in powers if power % every == 0] for every in (2, 3, 5, 10, 20)),
    ):
        inside = [tick for tick in ticks if lowest <= tick <= highest]
        if _nearest(inside, lowest, highest) >= gap:
            break
    return inside if len(inside) >= _ENOUGH else max(inside, _even_ticks(lowest, highest, gap), key=len)


def _nearest(ticks: Sequence[float], lowest: float, highest: float) -> float:
    """Return the least distance of two neighbours as a share of the axis."""
    ratios = (above / below for below, above in pairwise(ticks))
    return math.log(min(ratios, default=math.inf)) / math.log(highest / lowest)


def _even_ticks(lowest: float, highest: float, gap: float) -> list[float]:
    """Return round numbers at equal steps, for an axis so short that it is nearly linear; else nothing."""
    from matplotlib.ticker import MaxNLocator

    for most in range(8, 1, -1):
        steps = MaxNLocator(most, steps=[1, 2, 2.5, 5, 10]).tick_values(lowest, highest)
        ticks = [float(tick) for tick in steps if lowest <= tick <= highest]
        if _nearest(ticks, lowest, highest) >= gap:
            return ticks
    return []


def _limits(axis: Axis) -> tuple[float, float]:
    lowest, highest = sorted(axis.get_view_interval())
    return float(lowest), float(highest)


def _label_axis(axis: Axis, ticks: Sequence[float], text: Callable[[float], str]) -> None:
    from matplotlib.ticker import NullFormatter

    axis.set_ticks(ticks, list(map(text, ticks)))
    axis.set_minor_formatter(NullFormatter())


def number_text(value: float) -> str:
    """Write a number with its digits, and no power of ten.

    >>> number_text(1e-5), number_text(0.002), number_text(0.30000000000000004), number_text(2e6)
    ('0.00001', '0.002', '0.3', '2000000')
    """
    return np.format_float_positional(value, precision=6, fractional=False, trim="-")


def _size_label(n_bytes: float) -> str:
    number, unit = size_text(n_bytes).split(" ")
    return f"{float(number):g} {unit}"


_FONT_SIZE = 11
_NEAR, _FAR = 9, (20, 30, 42, 56, 72, 90)
"""How far a name may be from its point, in points; a far one is joined to it by a line."""

_AROUND_POINT, _AROUND_NAME, _AROUND_LINE = 6, 2, 1
"""Margins around the middle of a point, around a name, and around a line, in points."""

_ANGLES = (0, 90, 180, 270, 45, 225, 315, 135, 22, 67, 112, 157, 202, 247, 292, 337)
"""Directions in which a name may lie from its point, in degrees, the best first."""


def label_points(
    figure: Figure,
    axes: Axes,
    places: Sequence[tuple[float, float, str]],
    lines: Iterable[Sequence[tuple[float, float]]] = (),
) -> None:
    """Write names beside points, once the limits of the axes are final.

    places  x, y and name of each point. A name that fits nowhere is left out
    lines   what names keep clear of where they can
    """
    from matplotlib.transforms import Bbox

    figure.draw_without_rendering()
    middles = axes.transData.transform([(x, y) for x, y, _ in places] or np.empty((0, 2)))
    points = [Bbox.from_extents(x, y, x, y).padded(_AROUND_POINT) for x, y in middles]
    corners = [axes.transData.transform(line) for line in lines if len(line) > 1]
    parts = [part for line in corners for ends in pairwise(line) for part in _along(*ends)]
    written: list[Bbox] = []
    left = list(places)
    for number, distance in enumerate((_NEAR, _NEAR, *_FAR)):
        others = [*points, *parts] if number == 0 else points
        left = [place for place in left if not _label_point(axes, place, distance, others, written)]


def _label_point(
    axes: Axes, place: tuple[float, float, str], distance: float, others: list[Bbox], written: list[Bbox]
) -> bool:
    """Write a name at a distance from its point, unless it would hide something in every direction.

    others   boxes that the name may not hide
    written  names and lines so far; gets those of this point
    """
    x, y, name = place
    frame = axes.get_window_extent()
    middle = axes.transData.transform((x, y))
    for angle in np.deg2rad(_ANGLES):
        right, up = np.cos(angle), np.sin(angle)
        offset = (distance * right, distance * up)
        text = axes.annotate(
            name, (x, y), offset, textcoords="offset points", color=INK, fontsize=_FONT_SIZE,
            ha=_side(right, "right", "center", "left"), va=_side(up, "top", "center", "bottom"),
        )  # fmt: skip
        box = text.get_window_extent().padded(_AROUND_NAME)
        line = _along(middle, middle + offset) if distance > _NEAR else []
        is_inside = frame.x0 <= box.x0 and box.x1 <= frame.x1 and frame.y0 <= box.y0 and box.y1 <= frame.y1
        is_free = not box.count_overlaps([*others, *written])
        if is_inside and is_free and not any(part.count_overlaps(written) for part in line):
            written += [box, *line]
            if line:
                joined = {"arrowstyle": "-", "color": MUTED, "linewidth": 0.7, "shrinkA": 0, "shrinkB": 4}
                axes.annotate("", (x, y), offset, textcoords="offset points", arrowprops=joined)
            return True
        text.remove()
    return False


def _side(part: float, below: str, middle: str, above: str) -> str:
    return above if part > 0.3 else below if part < -0.3 else middle


def _along(start: np.ndarray, end: np.ndarray) -> list[Bbox]:
    """Return small boxes along a line, from where it leaves the point at its start."""
    from matplotlib.transforms import Bbox

    length = float(np.hypot(*(end - start)))
    steps = np.arange(_AROUND_POINT + 3, length, 3) / length
    return [
        Bbox.from_extents(x, y, x, y).padded(_AROUND_LINE) for x, y in start + steps[:, None] * (end - start)
    ]
