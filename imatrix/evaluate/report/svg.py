"""A matplotlib figure as SVG inside a page: its colours are the page's, light or dark, and its width, too.

A figure is drawn with colours that stand for names of the page's style sheet. In the SVG each becomes a
reference to that name. Every identifier gets a prefix, because all figures of a page share one name space.
"""

from __future__ import annotations

import io
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

INK, MUTED, GRID, SURFACE, RING = "#00ff01", "#00ff02", "#00ff03", "#00ff04", "#00ff05"
"""Colours that stand for those of text, of what matters less, of grid lines, of the page, and of outlines."""

SERIES = tuple(f"#00ff1{number:x}" for number in range(12))
"""Colours that stand for those of models."""

_NAMES = {
    INK: "--ink", MUTED: "--muted", GRID: "--grid", SURFACE: "--surface", RING: "--ring",
    **{colour: f"--series-{number}" for number, colour in enumerate(SERIES)},
}  # fmt: skip

_SVG, _LINK = "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"

SETTINGS: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "report",
    "font.size": 12,
    "text.parse_math": False,
    "axes.unicode_minus": False,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": MUTED,
    "axes.facecolor": "none",
    "axes.titlesize": 12,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "grid.color": GRID,
    "figure.facecolor": "none",
    "figure.dpi": 72,
    "legend.frameon": False,
    "legend.labelcolor": INK,
}
"""Settings of matplotlib under which figures are drawn: text stays text, and colours are the page's."""


def svg_text(figure: Figure, prefix: str, label: str, titles: Mapping[str, str]) -> str:
    """Return a figure as an SVG element.

    prefix  of its identifiers, another one for each figure of a page
    label   what it shows, for who can't see it
    titles  identifier of a drawn object (its gid) -> what a browser shows of it under the pointer
    """
    file = io.BytesIO()
    figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
    ElementTree.register_namespace("", _SVG)
    ElementTree.register_namespace("xlink", _LINK)
    root = ElementTree.fromstring(file.getvalue())
    for name in ("width", "height", "version"):
        root.attrib.pop(name, None)
    for metadata in root.findall(f"{{{_SVG}}}metadata"):
        root.remove(metadata)
    root.set("role", "img")
    root.set("aria-label", label)
    for element in root.iter():
        title = titles.get(element.get("id", ""))
        for name, value in element.attrib.items():
            element.set(name, _themed(value))
        _prefix(element, prefix)
        if title is not None:
            child = ElementTree.Element(f"{{{_SVG}}}title")
            child.text = title
            element.insert(0, child)
    return ElementTree.tostring(root, encoding="unicode")


def _themed(value: str) -> str:
    def name_of(colour: re.Match[str]) -> str:
        return f"var({_NAMES[colour[0]]})" if colour[0] in _NAMES else colour[0]

    return re.sub(r"#[0-9a-f]{6}\b", name_of, value)


def _prefix(element: ElementTree.Element, prefix: str) -> None:
    for name, value in element.attrib.items():
        if name == "id":
            element.set(name, prefix + value)
        elif name == f"{{{_LINK}}}href" and value.startswith("#"):
            element.set(name, f"#{prefix}{value[1:]}")
        elif "url(#" in value:
            element.set(name, value.replace("url(#", f"url(#{prefix}"))
