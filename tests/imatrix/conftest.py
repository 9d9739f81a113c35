"""The trained small model and its calibration text."""

from __future__ import annotations

import lzma
import shutil
from pathlib import Path

import pytest

from tests.support.tokenizer_files import copy_tokenizer

GOLDEN = Path(__file__).parents[1] / "golden"


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The trained model's Hugging Face folder."""
    folder = tmp_path_factory.mktemp("models") / "tiny-deepseek-v3"
    shutil.copytree(GOLDEN / "tiny-deepseek-v3", folder, ignore=shutil.ignore_patterns("README.md"))
    return copy_tokenizer("tiny", folder)


@pytest.fixture(scope="session")
def calibration(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The text that the golden files were recorded with."""
    path = tmp_path_factory.mktemp("text") / "calibration.txt"
    path.write_bytes(lzma.decompress((GOLDEN / "imatrix" / "calibration.txt.xz").read_bytes()))
    return path
