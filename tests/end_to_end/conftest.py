"""The trained tiny model as users have it: a folder, and the files made from it."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.imatrix.forward.float_files import files_of
from tests.support.trained_model import trained_model

GOLDEN = Path(__file__).parents[1] / "golden"
Recorded = dict[str, Any]


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The trained model's Hugging Face folder."""
    return trained_model(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def tiny_gguf(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return the trained model's GGUF file in an output type, made once."""
    return files_of(tiny_folder, tmp_path_factory.mktemp("gguf"), "tiny-")


def recorded_conversion(outtype: str) -> Recorded:
    """What llama.cpp's converter writes for the trained model."""
    found: Recorded = json.loads((GOLDEN / "convert" / f"tiny-deepseek-v3.{outtype}.json").read_text())
    return found


def recorded_quantization(which: str) -> Recorded:
    """What llama-quantize writes for the trained model; `which` is "f32.imatrix" or "bf16.noimatrix"."""
    with gzip.open(GOLDEN / "quantize" / f"tiny-deepseek-v3.{which}.json.gz") as file:
        found: Recorded = json.load(file)
    return found
