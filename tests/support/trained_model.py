"""The trained small model and its calibration text: `examples/tiny-deepseek-v3`."""

from __future__ import annotations

import shutil
from pathlib import Path

GOLDEN = Path(__file__).parents[1] / "golden"
EXAMPLE = Path(__file__).parents[2] / "examples" / "tiny-deepseek-v3"
"""A whole Hugging Face folder; a test that changes something works on a copy."""


def trained_model(parent: Path) -> Path:
    """Copy the model's folder into `parent`, without model card and text, and return the copy."""
    others = shutil.ignore_patterns("README.md", "calibration.txt")
    return Path(shutil.copytree(EXAMPLE, parent / EXAMPLE.name, ignore=others))


def calibration_text() -> bytes:
    """Return the text that importances were recorded with."""
    return (EXAMPLE / "calibration.txt").read_bytes()
