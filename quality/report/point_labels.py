"""Names beside the points of a chart, where they hide neither points nor each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from quality.report.svg import INK, MUTED

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.transforms import Bbox

_FONT_SIZE = 11
_NEAR, _FAR = 9, (20, 30, 42, 56, 72, 90)
"""How far a name may be from its point, in points; a far one is joined to it by a line."""

_AROUND_POINT, _AROUND_NAME, _AROUND_LINE = 6, 2, 1
"""What is kept free around the middle of a point, around a name, and around a line, in points."""

_ANGLES = (0, 90, 180, 270, 45, 225, 315, 135, 22, 67, 112, 157, 202, 247, 292, 337)
"""Directions in which a name may lie from its point, in degrees, the best first."""


def label_points(figure: Figure, axes: Axes, places: Sequence[tuple[float, float, str]]) -> None:
    """Write names beside points, once the limits of the axes are final.

    places  x, y and name of each point. A name that fits nowhere is left out
    """
    from matplotlib.transforms import Bbox

    figure.draw_without_rendering()
    middles = axes.transData.transform([(x, y) for x, y, _ in places] or np.empty((0, 2)))
    points = [Bbox.from_extents(x, y, x, y).padded(_AROUND_POINT) for x, y in middles]
    written: list[Bbox] = []
    left = [place for place in places if not _label(axes, place, _NEAR, points, written)]
    for place in left:
        any(_label(axes, place, distance, points, written) for distance in _FAR)


def _label(
    axes: Axes, place: tuple[float, float, str], distance: float, points: list[Bbox], written: list[Bbox]
) -> bool:
    """Write a name at a distance from its point, unless it would hide something in every direction.

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
        is_free = not box.count_overlaps([*points, *written])
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
