"""Draw docs/front.svg, a picture of the notes: divergence against size of the figures in docs/front.json.

    python scripts/record/front_picture.py

It needs matplotlib. The SVG looks like a chart of `evaluate --html`, and is light or dark as the viewer's
system is, because GitHub shows it on both. tests/contract/test_docs.py compares the picture with the figures,
and the figures with the tables they come from.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gguf_tools.drawing import CALIBRATED, CHOSEN, STOCK, Canvas, drawing, standalone_svg, svg_text
from imatrix.evaluate.report.points import MIB
from imatrix.evaluate.report.standalone import Curve, draw_curves

DOCS = Path(__file__).parents[2] / "docs"
FIGURES, PICTURE = DOCS / "front.json", DOCS / "front.svg"

CANVAS = Canvas("", 540, 460)

SERIES = (
    ("stock", STOCK, "o", 7, "stock: llama-quantize's bytes, with imatrix"),
    ("calibrated", CALIBRATED, "s", 6, "quantize --calibrate: same types and size"),
    ("chosen", CHOSEN, "D", 6, "--calibrate and --size: same size, types chosen"),
)
"""Keys of the figures, how each is drawn, and what the legend says."""

LABELS = (
    "size of the file\n(a tiny model of 11.6 million weights, on text that calibration had not seen)",
    "KL divergence from the original, nats a token",
)


def picture(figures: Mapping[str, Any]) -> str:
    """Draw the figures as an SVG."""
    files = figures["files"]
    curves = [
        Curve(
            label, colour, marker, size, [(file["mib"] * MIB, file[key]) for file in files],
            [file["type"] for file in files] if key == "stock" else (),
        )
        for key, colour, marker, size, label in SERIES
    ]  # fmt: skip
    with drawing(CANVAS) as figure:
        draw_curves(figure, curves, CANVAS, LABELS)
        return standalone_svg(svg_text(figure, "", f"{figures['what']}: {figures['model']}", {}))


if __name__ == "__main__":
    PICTURE.write_text(picture(json.loads(FIGURES.read_text(encoding="utf-8"))), encoding="utf-8")
    print(f"wrote {PICTURE}")
