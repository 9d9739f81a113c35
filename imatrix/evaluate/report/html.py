"""Parts that only the page of an evaluation has: a title, charts in two sizes, errors."""

from __future__ import annotations

from collections.abc import Callable
from datetime import date
from pathlib import Path

from gguf_tools.drawing import Canvas
from gguf_tools.hub.names import folder_name
from gguf_tools.text import counted, html_text
from imatrix.evaluate.divergence import Estimate
from imatrix.evaluate.report.charts import NARROW, WIDE


def page_title(base: Path, n_files: int) -> str:
    """Name a page by the model, how many files were measured, and the day."""
    today = date.today()
    day = f"{today.day} {today:%B %Y}"
    return f"{folder_name(base)}: {counted(n_files, 'quantized file')}, {day}"


def chart_html(name: str, title: str, caption: str, draw: Callable[[str, Canvas], str]) -> str:
    """Make a figure with the chart in both sizes, of which the style sheet shows one.

    draw  is given a prefix of identifiers, and the size
    """
    drawn = "".join(
        f'<div class="{canvas.name}">{draw(f"{name}-{canvas.name}-", canvas)}</div>'
        for canvas in (WIDE, NARROW)
    )
    return f"<figure><h2>{html_text(title)}</h2><figcaption>{html_text(caption)}</figcaption>{drawn}</figure>"


def estimate_text(estimate: Estimate, digits: int) -> str:
    """Show a number with its error."""
    return f"{estimate.value:.{digits}f} \u00b1 {estimate.error:.{digits}f}"
