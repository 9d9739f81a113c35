"""The parts of a page: its frame, tables, charts in two sizes, and text that controls nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import date
from pathlib import Path

from gguf_tools import __version__
from gguf_tools.hub.names import folder_name
from gguf_tools.text import counted, html_text
from imatrix.evaluate.divergence import Estimate
from imatrix.evaluate.report.charts import NARROW, WIDE, Canvas
from imatrix.evaluate.report.style import STYLE


def page_html(title: str, sections: Iterable[str], more_style: str = "") -> str:
    """Put a page together; nothing in it is loaded from elsewhere.

    more_style  rules of this page alone, behind those of all
    """
    return "\n".join(
        [
            "<!DOCTYPE html>",
            '<html lang="en">',
            '<head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f'<meta name="generator" content="gguf-tools {__version__}">',
            f"<title>{html_text(title)}</title>",
            f"<style>\n{STYLE}{more_style}</style></head>",
            "<body>",
            *sections,
            "</body></html>\n",
        ]
    )


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


def table_html(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Yield a table, which scrolls by itself where it is wider than the screen."""
    yield '<div class="scroll"><table>'
    yield "<tr>" + "".join(f"<th>{html_text(heading)}</th>" for heading in headings) + "</tr>"
    for row in rows:
        yield "<tr>" + "".join(f"<td>{html_text(cell)}</td>" for cell in row) + "</tr>"
    yield "</table></div>"


def visible(text: str) -> str:
    """Escape text for HTML so that line ends and control characters can be seen in it."""
    return "\u23ce\n".join(map(html_text, text.split("\n")))


def estimate_text(estimate: Estimate, digits: int) -> str:
    """Show a number with its error."""
    return f"{estimate.value:.{digits}f} \u00b1 {estimate.error:.{digits}f}"
