"""The parts of every page: frame, tables, text that controls nothing, and the style sheet.

The page is light or dark as the reader's system is, and has one column on a narrow screen.

The colours of files are told apart with each kind of colour blindness: those of red and green were simulated
(Machado, Oliveira and Fernandes, 2009), and twelve colours searched for that are far apart in OKLab for
everybody, and that stand out from the background by 3 to 1. tests/imatrix/evaluate/test_charts.py
measures it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from gguf_tools import __version__
from gguf_tools.text import html_text

LIGHT = """\
--ink: #0b0b0b; --muted: #6d6c66; --grid: #e1e0d9; --surface: #fcfcfb; --ring: #8a8983; --panel: #f3f2ee;
--heat: 226 72 40; --stock: #8c5a00; --calibrated: #0969da; --chosen: #1a7f37;
--bad: #b3261e; --warning: #8c5a00;
--series-0: #1b76ef; --series-1: #fd4470; --series-2: #254f13; --series-3: #210784; --series-4: #9e5f04;
--series-5: #2f9c8b; --series-6: #aa2db6; --series-7: #491a35; --series-8: #a780cf; --series-9: #305d83;
--series-10: #a30c49; --series-11: #4412ef;"""

DARK = """\
--ink: #f4f4f2; --muted: #a3a29a; --grid: #33322f; --surface: #1a1a19; --ring: #6d6c66; --panel: #252523;
--heat: 235 96 52; --stock: #e3a24a; --calibrated: #58a6ff; --chosen: #4ac26b;
--bad: #ff8a73; --warning: #e3a24a;
--series-0: #75b4f9; --series-1: #f9f66a; --series-2: #d02e1e; --series-3: #60aa7d; --series-4: #ff7ac3;
--series-5: #72fbf6; --series-6: #d08321; --series-7: #ac73fe; --series-8: #83d702; --series-9: #f4b99b;
--series-10: #1e767e; --series-11: #d50eb8;"""

THEME = f"""\
:root {{ color-scheme: light dark; {LIGHT} }}
@media (prefers-color-scheme: dark) {{ :root {{ {DARK} }} }}
"""

FONTS = 'system-ui, -apple-system, "Segoe UI", Roboto, "Liberation Sans", sans-serif'

OVER_LINES = "paint-order: stroke; stroke: var(--surface); stroke-width: 3px;"
"""The look of a chart's text, which lines may run behind."""

STYLE = f"""\
{THEME}* {{ box-sizing: border-box; }}
body {{ margin: 0 auto; max-width: 1160px; padding: 16px; background: var(--surface); color: var(--ink);
  font: 15px/1.5 {FONTS}; }}
h1 {{ font-size: 1.5rem; margin: 0 0 .25rem; overflow-wrap: anywhere; }}
h2 {{ font-size: 1.1rem; margin: 2rem 0 .25rem; }}
p, figcaption {{ margin: .25rem 0 .75rem; max-width: 46rem; overflow-wrap: anywhere; }}
.note, figcaption {{ color: var(--muted); font-size: .9rem; }}
.scroll {{ overflow-x: auto; margin-bottom: 1rem; }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .9rem; }}
th, td {{ padding: .3rem .7rem; text-align: right; white-space: nowrap;
  border-bottom: 1px solid var(--grid); }}
th:first-child, td:first-child {{ text-align: left; padding-left: 0; }}
th {{ color: var(--muted); font-weight: 600; }}
figure {{ margin: 0; min-width: 0; }}
figure svg {{ display: block; width: 100%; height: auto; }}
svg text {{ font-family: inherit !important; }}
.charts svg text {{ {OVER_LINES} }}
.charts {{ display: grid; grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 8px 32px; }}
.narrow {{ display: none; }}
details {{ margin: .5rem 0; }}
summary {{ cursor: pointer; font-weight: 600; overflow-wrap: anywhere; }}
.passage {{ max-width: none; margin: .25rem 0 1rem; padding: .6rem .8rem; background: var(--panel);
  border-radius: 6px; font: 13px/1.7 ui-monospace, "Liberation Mono", monospace; white-space: pre-wrap;
  overflow-wrap: anywhere; }}
.before {{ color: var(--muted); }}
.changes {{ margin: -.5rem 0 1rem; padding-left: 1.2rem; font-size: .9rem; overflow-wrap: anywhere; }}
.changes b {{ font-family: ui-monospace, "Liberation Mono", monospace; white-space: pre-wrap;
  background: var(--panel); border-radius: 3px; padding: 0 .25em; }}
.summary {{ font-size: 1.05rem; }}
.passage span[title] {{ background: rgb(var(--heat) / var(--heat-share)); border-radius: 2px; }}
@media (max-width: 760px) {{
  .charts {{ grid-template-columns: minmax(0, 1fr); }}
  .wide {{ display: none; }}
  .narrow {{ display: block; }}
}}
"""


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
