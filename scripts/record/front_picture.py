"""Draw docs/front.svg, the README's picture: divergence against size of the figures in docs/front.json.

    python scripts/record/front_picture.py

The SVG is text. It has its own background, and takes light or dark colours as the viewer prefers, because
GitHub shows it on both. tests/contract/test_docs.py compares the picture with the figures, and the figures
with the tables they come from.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[2] / "docs"
FIGURES, PICTURE = DOCS / "front.json", DOCS / "front.svg"

WIDTH, HEIGHT = 720, 400
LEFT, RIGHT, TOP, BOTTOM = 62, 206, 46, 58
"""Margins in pixels; the names of the series are in the right one."""

SIZES = (3.5, 8.5)
"""Ends of the x axis in MiB."""
DIVERGENCES = (0.0002, 0.2)
"""Ends of the y axis in nats; it is logarithmic."""

SERIES = {
    "stock": ("stock", "llama-quantize's bytes, with imatrix"),
    "calibrated": ("quantize --calibrate", "same types and size"),
    "chosen": ("--calibrate and --size", "same size, types chosen"),
}
"""The names of each series, beside its last point."""

STYLE = """\
svg { color-scheme: light dark; font: 12px system-ui, sans-serif; }
.paper { fill: #ffffff; } text { fill: #1f2328; } .faint { fill: #59636e; } .grid { stroke: #d8dee4; }
.stock { --ink: #8c5a00; } .calibrated { --ink: #0969da; } .chosen { --ink: #1a7f37; }
polyline { fill: none; stroke: var(--ink); stroke-width: 2; } circle, text.name { fill: var(--ink); }
.title { font-size: 14px; font-weight: 600; } .name { font-weight: 600; }
@media (prefers-color-scheme: dark) {
.paper { fill: #0d1117; } text { fill: #e6edf3; } .faint { fill: #9198a1; } .grid { stroke: #30363d; }
.stock { --ink: #e3a24a; } .calibrated { --ink: #58a6ff; } .chosen { --ink: #4ac26b; }
}"""


def picture(figures: Mapping[str, Any]) -> str:
    """Draw the figures as an SVG."""
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">',
            f"<title>{figures['what']}: {figures['model']}</title>",
            f"<style>\n{STYLE}\n</style>",
            f'<rect class="paper" width="{WIDTH}" height="{HEIGHT}" rx="6"/>',
            '<text class="title" x="16" y="26">KL divergence from the original, against file size</text>',
            *_axes(),
            *(line for key in SERIES for line in _series(figures["files"], key)),
            "</svg>\n",
        ]
    )


def _axes() -> Iterator[str]:
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
    for size in range(4, 9):
        yield f'<path class="grid" d="M{_x(size)} {TOP}V{bottom}"/>'
        yield f'<text class="faint" x="{_x(size)}" y="{bottom + 18}" text-anchor="middle">{size} MiB</text>'
    for divergence in ("0.001", "0.01", "0.1"):
        y = _y(float(divergence))
        yield f'<path class="grid" d="M{LEFT} {y}H{right}"/>'
        yield f'<text class="faint" x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{divergence}</text>'
    yield (
        f'<text class="faint" x="16" y="{HEIGHT - 12}">nats per token, logarithmic; a tiny model of 11.6'
        " million weights, on text that calibration had not seen</text>"
    )


def _series(files: list[Mapping[str, Any]], key: str) -> Iterator[str]:
    points = [(_x(file["mib"]), _y(file[key])) for file in files]
    yield f'<g class="{key}">'
    yield f'<polyline points="{" ".join(f"{x},{y}" for x, y in points)}"/>'
    for (x, y), file in zip(points, files, strict=True):
        yield f'<circle cx="{x}" cy="{y}" r="3.5"/>'
        if key == "stock":
            yield f'<text class="faint" x="{x + 6:.1f}" y="{y - 7:.1f}">{file["type"]}</text>'
    x, y = points[-1]
    name, note = SERIES[key]
    y = {"stock": y + 10, "calibrated": y - 10, "chosen": y + 14}[key]
    yield f'<text class="name" x="{x + 12:.1f}" y="{y + 4:.1f}">{name}</text>'
    yield f'<text class="faint" x="{x + 12:.1f}" y="{y + 19:.1f}">{note}</text>'
    yield "</g>"


def _x(size: float) -> float:
    low, high = SIZES
    return round(LEFT + (size - low) / (high - low) * (WIDTH - LEFT - RIGHT), 1)


def _y(divergence: float) -> float:
    low, high = map(math.log, DIVERGENCES)
    return round(HEIGHT - BOTTOM - (math.log(divergence) - low) / (high - low) * (HEIGHT - TOP - BOTTOM), 1)


def main() -> None:
    PICTURE.write_text(picture(json.loads(FIGURES.read_text(encoding="utf-8"))), encoding="utf-8")
    print(f"wrote {PICTURE}")


if __name__ == "__main__":
    main()
