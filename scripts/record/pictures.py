"""Draw the pictures of docs: divergence against size of the figures in the JSON file beside each.

    python scripts/record/pictures.py

It needs matplotlib. The SVGs look like a chart of `evaluate --html`, and are light or dark as the viewer's
system is, because GitHub shows them on both. tests/contract/test_docs.py compares the pictures with the
figures, and the figures with the tables they come from.
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
FRONT, TINY = DOCS / "front.json", DOCS / "notes" / "tiny.json"
"""Figures of a model that people run, and of the tiny one in `examples/`."""

CANVAS = Canvas("", 540, 460)

SERIES = (
    ("stock", STOCK, "o", 7, "stock: llama-quantize's bytes, with imatrix"),
    ("calibrated", CALIBRATED, "s", 6, "quantize --calibrate: same types and size"),
    ("chosen", CHOSEN, "D", 6, "--calibrate and --size: same size, types chosen"),
)
"""Keys of the figures, how each is drawn, and what the legend says; a model may lack the last."""


def picture(figures: Mapping[str, Any]) -> str:
    """Draw the figures as an SVG."""
    files = figures["files"]
    labels = f"size of the file\n({figures['note']})", "KL divergence from the original, nats a token"
    curves = [
        Curve(
            label, colour, marker, size, [(file["mib"] * MIB, file[key]) for file in files],
            [file["type"] for file in files] if key == "stock" else (),
        )
        for key, colour, marker, size, label in SERIES
        if key in files[0]
    ]  # fmt: skip
    with drawing(CANVAS) as figure:
        draw_curves(figure, curves, CANVAS, labels)
        return standalone_svg(svg_text(figure, "", f"{figures['what']}: {figures['model']}", {}))


if __name__ == "__main__":
    for path in (FRONT, TINY):
        drawn = picture(json.loads(path.read_text(encoding="utf-8")))
        path.with_suffix(".svg").write_text(drawn, encoding="utf-8")
        print(f"wrote {path.with_suffix('.svg')}")
