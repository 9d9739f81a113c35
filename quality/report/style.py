"""The style sheet of a report."""

from __future__ import annotations

_LIGHT = """\
--ink: #0b0b0b; --muted: #6d6c66; --grid: #e1e0d9; --surface: #fcfcfb; --ring: #8a8983; --panel: #f3f2ee;
--heat: 226 72 40;
--series-0: #2a78d6; --series-1: #d9571e; --series-2: #14906a; --series-3: #b07800; --series-4: #c4498a;
--series-5: #008300; --series-6: #4a3aa7; --series-7: #c9302f;"""

_DARK = """\
--ink: #f4f4f2; --muted: #a3a29a; --grid: #33322f; --surface: #1a1a19; --ring: #6d6c66; --panel: #252523;
--heat: 235 96 52;
--series-0: #5a9ff0; --series-1: #f07f4f; --series-2: #2fbd8a; --series-3: #dca022; --series-4: #ea7bb0;
--series-5: #3fb53f; --series-6: #a59cf5; --series-7: #f07e7e;"""

STYLE = f"""\
:root {{ color-scheme: light dark; {_LIGHT} }}
@media (prefers-color-scheme: dark) {{ :root {{ {_DARK} }} }}
* {{ box-sizing: border-box; }}
body {{ margin: 0 auto; max-width: 1160px; padding: 16px; background: var(--surface); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Liberation Sans", sans-serif; }}
h1 {{ font-size: 1.5rem; margin: 0 0 .25rem; overflow-wrap: anywhere; }}
h2 {{ font-size: 1.1rem; margin: 2rem 0 .25rem; }}
p, figcaption {{ margin: .25rem 0 .75rem; max-width: 46rem; overflow-wrap: anywhere; }}
.note, figcaption {{ color: var(--muted); font-size: .9rem; }}
.scroll {{ overflow-x: auto; }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .9rem; }}
th, td {{ padding: .3rem .7rem; text-align: right; white-space: nowrap;
  border-bottom: 1px solid var(--grid); }}
th:first-child, td:first-child {{ text-align: left; padding-left: 0; }}
th {{ color: var(--muted); font-weight: 600; }}
figure {{ margin: 0; min-width: 0; }}
figure svg {{ display: block; width: 100%; height: auto; }}
svg text {{ font-family: inherit !important; }}
.charts svg text {{ paint-order: stroke; stroke: var(--surface); stroke-width: 3px; }}
.charts {{ display: grid; grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 8px 32px; }}
.narrow {{ display: none; }}
details {{ margin: .5rem 0; }}
summary {{ cursor: pointer; font-weight: 600; overflow-wrap: anywhere; }}
.passage {{ max-width: none; margin: .25rem 0 1rem; padding: .6rem .8rem; background: var(--panel);
  border-radius: 6px; font: 13px/1.7 ui-monospace, "Liberation Mono", monospace; white-space: pre-wrap;
  overflow-wrap: anywhere; }}
.passage .before {{ color: var(--muted); }}
.passage span[title] {{ background: rgb(var(--heat) / var(--heat-share)); border-radius: 2px; }}
@media (max-width: 760px) {{
  .charts {{ grid-template-columns: minmax(0, 1fr); }}
  .wide {{ display: none; }}
  .narrow {{ display: block; }}
}}
"""
"""The style sheet: light or dark as the reader's system is, and one column on a narrow screen."""
