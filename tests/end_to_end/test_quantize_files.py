"""Whole files, byte for byte: header, order, padding and data as llama-quantize writes them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import gguf_tools.commands.quantize
from tests.end_to_end.quantize_cases import CASES, GOLDEN, MATRIX_NAME, arguments, file_hashes, make_inputs

RECORDED = json.loads((GOLDEN / "quantize" / "files.json").read_text())


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files") / "inputs"
    make_inputs(folder)
    return folder


def test_the_inputs_are_those_of_the_recording(inputs: Path) -> None:
    assert file_hashes(inputs) == RECORDED["inputs"]


@pytest.mark.parametrize("case", CASES)
def test_output_equals_llama_quantizes(case: str, inputs: Path, tmp_path: Path) -> None:
    words = arguments(case, inputs, tmp_path / "out.gguf", inputs / MATRIX_NAME)
    assert gguf_tools.commands.quantize.main(["--no-provenance", *words]) == 0
    assert file_hashes(tmp_path) == RECORDED["outputs"][case]
