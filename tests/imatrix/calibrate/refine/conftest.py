"""A file to refine."""

from __future__ import annotations

from pathlib import Path

import pytest

import convert
from quantize import quantize
from tests.imatrix.calibrate.words import write_words
from tests.support.decoder_models import decoder_model


@pytest.fixture(scope="package")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with base.gguf, file.gguf of 2 bits, and a text."""
    folder = tmp_path_factory.mktemp("made")
    decoder_model("llama-biases", folder / "hf", hidden_size=256, intermediate_size=256)
    convert.convert(folder / "hf", folder / "base.gguf", outtype="f32")
    quantize(folder / "base.gguf", folder / "file.gguf", "Q2_K")
    write_words(folder / "text.txt", 6000)
    return folder
