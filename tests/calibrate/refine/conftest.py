"""A file to refine."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import convert
from quantize import quantize
from tests.support.decoder_models import decoder_model

WORDS = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "iota", "kappa", "lambda"]


@pytest.fixture(scope="package")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with base.gguf, file.gguf of 2 bits, and a text."""
    folder = tmp_path_factory.mktemp("made")
    decoder_model("llama-biases", folder / "hf", hidden_size=256, intermediate_size=256)
    convert.convert(folder / "hf", folder / "base.gguf", outtype="f32")
    quantize(folder / "base.gguf", folder / "file.gguf", "Q2_K")
    order = np.random.default_rng(3).integers(0, len(WORDS), 6000)
    (folder / "text.txt").write_text(" ".join(WORDS[number] for number in order))
    return folder
