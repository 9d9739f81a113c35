"""matplotlib's figures in the style of every page: as SVG inside one, or as files that stand alone.

A figure is drawn with colours that stand for names of the style sheet. In an SVG each becomes a reference to
that name, light or dark as the reader's system is. A PNG or PDF can't refer to names, so its figure is drawn
with the light colours. Every identifier gets a prefix, because all figures of a page share one name space.
"""

from __future__ import annotations

import io
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gguf_tools.errors import BadRequest
from gguf_tools.files.named_files import whole_file
from gguf_tools.web_page import FONTS, LIGHT, OVER_LINES, THEME

if TYPE_CHECKING:
    from matplotlib.figure import Figure

INK, MUTED, GRID, SURFACE, RING = "#00ff01", "#00ff02", "#00ff03", "#00ff04", "#00ff05"
"""Colours that stand for those of text, of what matters less, of grid lines, of the page, and of outlines."""

SERIES = tuple(f"#00ff1{number:x}" for number in range(12))
"""Colours that stand for those of models."""

STOCK, CALIBRATED, CHOSEN = "C0", "C1", "C2"
"""Colours of stock files, of calibrated ones, and of those whose types are chosen."""

_NAMES = {
    INK: "--ink", MUTED: "--muted", GRID: "--grid", SURFACE: "--surface", RING: "--ring",
    **{colour: f"--series-{number}" for number, colour in enumerate(SERIES)},
    "#00ff20": "--stock", "#00ff21": "--calibrated", "#00ff22": "--chosen",
}  # fmt: skip

_LIGHT = dict(re.findall(r"(--[\w-]+): (#\w+);", LIGHT))

_SVG, _LINK = "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"

MARK = "<!-- gguf-tools chart -->"
"""How our charts are told from others."""

_MARGIN = 12
"""Width of the margin of charts that stand alone, in pixels."""

_SETTINGS: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "report",
    "font.size": 12,
    "text.parse_math": False,
    "axes.unicode_minus": False,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": MUTED,
    "axes.facecolor": "none",
    "axes.prop_cycle": "cycler('color', ['#00ff20', '#00ff21', '#00ff22'])",
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
    "savefig.dpi": 144,
    "legend.frameon": False,
    "legend.labelcolor": INK,
}
"""Settings of matplotlib under which figures are drawn: text stays text, and colours are the page's."""


@dataclass(frozen=True)
class Canvas:
    """The size that a chart is drawn at, in the page's pixels; `name` is a class of the style sheet."""

    name: str
    width: int
    height: int


def require_matplotlib(what: str) -> None:
    """Raise BadRequest saying what to install where matplotlib is missing.

    what  needs it
    """
    if find_spec("matplotlib") is None:
        raise BadRequest(f"{what} needs matplotlib: pip install 'gguf-tools[report]'")


@contextmanager
def drawing(canvas: Canvas, settings: Mapping[Any, Any] = _SETTINGS) -> Iterator[Figure]:
    """Give an empty figure, and the settings that it has to be drawn under."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(dict(settings)):
        yield Figure((canvas.width / 72, canvas.height / 72), layout="constrained")


@contextmanager
def drawn_file(path: Path, canvas: Canvas, label: str) -> Iterator[Figure]:
    """Give an empty figure, and write it in the end: as SVG, or as what else the path's ending says.

    Only colours of the settings and `STOCK`, `CALIBRATED` and `CHOSEN` are known in each kind of picture.

    label   what it shows, for who can't see it
    raises  BadRequest for an unknown ending, OutputError when it can't be written
    """
    form = path.suffix.lower().removeprefix(".") or "svg"
    light = {key: _replaced(value, _LIGHT.__getitem__) for key, value in _SETTINGS.items()}
    with drawing(canvas, _SETTINGS if form == "svg" else light) as figure:
        known = figure.canvas.get_supported_filetypes()
        if form not in known:
            forms = ", ".join(sorted(known))
            raise BadRequest(f"{path}: a picture can't be {form!r}, expected one of {forms}")
        yield figure
        with whole_file(path) as file:
            if form == "svg":
                file.write(standalone_svg(svg_text(figure, "", label, {})).encode())
            else:
                figure.savefig(
                    file, format=form, facecolor=_LIGHT["--surface"], bbox_inches="tight",
                    pad_inches=_MARGIN / 72,
                )  # fmt: skip


def standalone_svg(svg: str) -> str:
    """Make a file of what `svg_text` returns: with a margin, a size, the fonts, and both sets of colours."""
    found = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', svg)
    assert found is not None
    width, height = (f"{float(side) + 2 * _MARGIN:g}" for side in found.groups())
    box = f'viewBox="{-_MARGIN} {-_MARGIN} {width} {height}" width="{width}" height="{height}"'
    style = (
        f"{THEME}svg {{ background: var(--surface); max-width: 100%; height: auto; }}\n"
        f"text {{ font-family: {FONTS} !important; {OVER_LINES} }}"
    )
    begin = svg.index(">") + 1
    start = svg[:begin].replace(found[0], box)
    return f"{MARK}\n{start}<style>\n{style}\n</style>{svg[begin:]}\n"


def heat_colours(n: int) -> list[str]:
    """Return colours of little to much, which all stand out from a light page and from a dark one."""
    import matplotlib

    scale = matplotlib.colormaps["magma"]
    colours = (scale(0.92 - 0.7 * step / (n - 1)) for step in range(n))
    return ["#" + "".join(f"{round(255 * part):02x}" for part in colour[:3]) for colour in colours]


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
            element.set(name, _replaced(value, "var({})".format))
        _prefix(element, prefix)
        if title is not None:
            child = ElementTree.Element(f"{{{_SVG}}}title")
            child.text = title
            element.insert(0, child)
    return ElementTree.tostring(root, encoding="unicode")


def _replaced(value: Any, colour_of: Callable[[str], str]) -> Any:
    """Put colours in the place of those that stand for names; `colour_of` is given the name."""

    def replace(found: re.Match[str]) -> str:
        return colour_of(_NAMES[found[0]]) if found[0] in _NAMES else found[0]

    return re.sub(r"#[0-9a-f]{6}\b", replace, value) if isinstance(value, str) else value


def _prefix(element: ElementTree.Element, prefix: str) -> None:
    for name, value in element.attrib.items():
        if name == "id":
            element.set(name, prefix + value)
        elif name == f"{{{_LINK}}}href" and value.startswith("#"):
            element.set(name, f"#{prefix}{value[1:]}")
        elif "url(#" in value:
            element.set(name, value.replace("url(#", f"url(#{prefix}"))
