"""Whole files of small models of many architectures, byte for byte as llama.cpp writes them.

scripts/check/whole_files.py records the digests, and compares as many more cases as one likes.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.quantize.whole_files import digests, draw_case

GOLDEN = Path(__file__).parents[1] / "golden" / "whole_files.json"
CASES = json.loads(GOLDEN.read_text())["cases"]


@pytest.mark.parametrize("seed", CASES)
def test_whole_files_are_llama_cpps(tmp_path: Path, seed: str) -> None:
    case, recorded = draw_case(int(seed)), CASES[seed]
    source = case.model.write(tmp_path / "in.gguf")
    assert digests(sorted(tmp_path.glob("in*.gguf"))) == recorded["input"], "the draws are not those recorded"
    assert digests(case.make(source, tmp_path / "out.gguf")) == recorded["output"], str(case)
