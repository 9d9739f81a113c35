"""A chart that stands alone, for a README: an SVG that brings its own colours, light and dark."""

from __future__ import annotations

import os
from pathlib import Path

from convert.card.facts import read_report
from imatrix.evaluate.report.charts import WIDE, require_matplotlib, size_chart
from imatrix.evaluate.report.points import report_points
from imatrix.evaluate.report.style import DARK, LIGHT

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
