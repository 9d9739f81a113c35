"""Charts with a row for each class of texts, in which every file has a mark with its interval.

A bar joins the marks of a row: it is as long as the files are far apart. Marks stand on one line unless they,
or their intervals, would hide each other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from gguf_tools.drawing import GRID, MUTED, SURFACE, Canvas, drawing, svg_text
from gguf_tools.text import printable
from imatrix.evaluate.report.charts import BESIDE_AXES, SMALLEST_KLD, Style, label_numbers, legend
from imatrix.evaluate.report.points import short_names

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_A_ROW, _A_LANE = 22, 10
"""Height of a row, and of each line in it that marks stand on, in points."""

_MOST_LANES = 4
"""Lines in a row; marks that find no place on one of so many hide others."""

_A_MARK = 14
"""Width that is kept free around the middle of a mark, in points."""

_A_SHARE = 60
"""Width of a share on the axis, in points."""

_FLOOR_WITHIN = 6
"""A noise floor is shown that is at most so many times lower than the lowest mark."""

_AROUND = 96
"""About what axis, legend and margins take above and below the rows, in points."""

Scale = Literal["log", "linear"]


@dataclass(frozen=True)
class Mark:
    """Value of a file in a row, with its interval; an end that is NaN is not known.

    is_sure  whether it differs significantly from what it is compared with; it is drawn hollow if not
    """

    value: float
    low: float
    high: float
    title: str
    is_sure: bool = True


@dataclass(frozen=True)
class ClassRows:
    """A chart's contents.

    names   of the rows, from top to bottom
    files   of the marks in each row, and their numbers among all files, which decide how they are drawn
    marks   of each file, one for each row
    label   of the axis
    scale   of the axis; a linear one has shares, 0 to 1, and shows them in percent
    line    where an upright line stands; None: nowhere
    floors  noise floor of each row; None: not measured
    has_total  whether the last row is about all classes
    """

    names: Sequence[str]
    files: Sequence[tuple[int, str]]
    marks: Sequence[Sequence[Mark]]
    label: str
    scale: Scale = "log"
    line: float | None = None
    floors: Sequence[float] | None = None
    has_total: bool = False


def class_chart(rows: ClassRows, prefix: str, canvas: Canvas) -> str:
    """Return the chart; it is as high as its rows ask for."""
    names = short_names([printable(name) for _, name in rows.files])
    width = canvas.width - BESIDE_AXES - 8 * max(map(len, rows.names))
    limits = _limits(rows)
    lanes = [_lanes([of_file[row] for of_file in rows.marks], rows.scale, limits, _A_MARK / width)
             for row in range(len(rows.names))]  # fmt: skip
    row_height = max(_A_ROW, _A_LANE * (2 + max(lane for row in lanes for lane in row)))
    n_lines = -(-len(names) // max(1, canvas.width // (52 + 7 * max(map(len, names)))))
    height = _AROUND + 16 * n_lines + row_height * len(rows.names)
    titles: dict[str, str] = {}
    with drawing(Canvas(canvas.name, canvas.width, height)) as figure:
        axes = figure.subplots()
        axes.set(xscale=rows.scale, xlim=limits, ylim=(len(rows.names) - 0.5, -0.5), xlabel=rows.label)
        _draw_rows(axes, rows)
        for place, ((number, _), name) in enumerate(zip(rows.files, names, strict=True)):
            style = Style.of(number)
            for row, mark in enumerate(rows.marks[place]):
                gid = f"mark{place}-{row}"
                titles[gid] = mark.title
                shift = (lanes[row][place] - max(lanes[row]) / 2) * _A_LANE / row_height
                _draw_mark(axes, mark, row + shift, style, gid)
            axes.plot([], [], linestyle="", marker=style.marker, markersize=style.marker_size,
                      color=style.colour, label=name)  # fmt: skip
        if rows.scale == "log":
            label_numbers(axes.xaxis, width)
        else:
            _label_shares(axes, width)
        legend(figure, axes, canvas)
        return svg_text(figure, prefix, f"{rows.label} of each file, by class of texts", titles)


def _label_shares(axes: Axes, width: float) -> None:
    """Label the axis with shares in percent."""
    from matplotlib.ticker import MaxNLocator, PercentFormatter

    axes.xaxis.set_major_locator(MaxNLocator(max(2, int(width // _A_SHARE)), steps=[1, 2, 2.5, 5, 10]))
    axes.xaxis.set_major_formatter(PercentFormatter(1))


def _lanes(marks: Sequence[Mark], scale: Scale, limits: tuple[float, float], gap: float) -> list[int]:
    """Choose the line of a row that each mark stands on, so that none hides another.

    gap  width of a mark, as a share of the axis
    """
    ends = np.array([(mark.low, mark.value, mark.high) for mark in marks])
    low, high = limits
    with np.errstate(invalid="ignore", divide="ignore"):
        places = np.log(ends / low) / np.log(high / low) if scale == "log" else (ends - low) / (high - low)
    middle = places[:, 1]
    starts = np.fmin(places[:, 0], middle - gap / 2)
    stops = np.fmax(places[:, 2], middle + gap / 2)
    lanes, filled = [0] * len(marks), [-math.inf]
    for number in np.argsort(starts).tolist():
        free = next((lane for lane, stop in enumerate(filled) if stop <= starts[number]), len(filled))
        if free == _MOST_LANES:
            free = int(np.argmin(filled))
        filled[free : free + 1] = [float(stops[number])]
        lanes[number] = free
    return lanes


def _limits(rows: ClassRows) -> tuple[float, float]:
    """Return the limits of the axis, with some room around what is drawn."""
    marks = [mark for of_file in rows.marks for mark in of_file]
    values = [number for mark in marks for number in (mark.value, mark.low, mark.high)]
    values += [] if rows.line is None else [rows.line]
    known = [number for number in values if math.isfinite(number)]
    if rows.scale == "linear":
        low, high = min([0.0, *known]), max([0.0, *known])
        high = high if high > low else low + 1e-3
        room = 0.06 * (high - low)
        return low - (room if low < 0 else room / 3), high + room
    known = [number for number in known if number > SMALLEST_KLD] or [0.1, 1.0]
    low, high = min(known), max(known)
    if rows.floors is not None and max(rows.floors) > low / _FLOOR_WITHIN:
        low = min(low, max(min(rows.floors) / 1.2, low / _FLOOR_WITHIN))
    room = max((high / low) ** 0.06, 1.05)
    return low / room, high * room


def floor_text(rows: ClassRows) -> str:
    """Say what a chart shows of the noise floor."""
    if rows.floors is None:
        return "The noise floor was not measured (--noise-floor)."
    if max(rows.floors) <= _limits(rows)[0]:
        return f"The noise floor, {max(rows.floors):.2g} at most, is below what the axis shows."
    return "What the grey steps cover is noise."


def _draw_rows(axes: Axes, rows: ClassRows) -> None:
    """Draw what lies behind the marks: names, noise floors, and bars from the least value to the largest."""
    axes.set_yticks(range(len(rows.names)), list(map(printable, rows.names)))
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=True, axis="x", linewidth=0.8)
    start, _ = axes.get_xlim()
    for row, floor in enumerate(rows.floors or ()):
        if floor > start:
            row_ends = row - 0.5, row + 0.5
            axes.fill_betweenx(row_ends, start, floor, color=GRID, alpha=0.7, linewidth=0, zorder=0)
    for row in range(len(rows.names)):
        values = [of_file[row].value for of_file in rows.marks]
        known = [value for value in values if math.isfinite(value) and (rows.scale == "linear" or value > 0)]
        if len(known) > 1:
            axes.plot([min(known), max(known)], [row, row], color=GRID, linewidth=5, zorder=1,
                      solid_capstyle="round")  # fmt: skip
    if rows.line is not None:
        axes.axvline(rows.line, color=MUTED, linewidth=1.2, zorder=1)
    if rows.has_total:
        axes.axhline(len(rows.names) - 1.5, color=MUTED, linewidth=0.8)


def _draw_mark(axes: Axes, mark: Mark, height: float, style: Style, gid: str) -> None:
    ends = np.array([mark.low, mark.high])
    if np.isfinite(ends).all():
        axes.plot(ends, [height, height], color=style.colour, linewidth=1.6, zorder=2)
    (drawn,) = axes.plot(
        [mark.value], [height], linestyle="", marker=style.marker, markersize=style.marker_size * 0.8,
        color=style.colour if mark.is_sure else SURFACE,
        markeredgecolor=SURFACE if mark.is_sure else style.colour,
        markeredgewidth=0.8 if mark.is_sure else 1.4, zorder=3,
    )  # fmt: skip
    drawn.set_gid(gid)
