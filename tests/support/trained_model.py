"""The trained small model and the text that it was trained on, from the golden files."""

from __future__ import annotations

import lzma
import shutil
from pathlib import Path

from tests.support.tokenizer_files import copy_tokenizer

GOLDEN = Path(__file__).parents[1] / "golden"


def trained_model(parent: Path) -> Path:
    """Make the model's Hugging Face folder in `parent`, and return it."""
    folder = parent / "tiny-deepseek-v3"
    shutil.copytree(GOLDEN / "tiny-deepseek-v3", folder, ignore=shutil.ignore_patterns("README.md"))
    return copy_tokenizer("tiny", folder)


def calibration_text() -> bytes:
    """Return the text that importances were recorded with."""
    return lzma.decompress((GOLDEN / "imatrix" / "calibration.txt.xz").read_bytes())
